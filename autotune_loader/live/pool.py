"""A pool: an ordinary DataLoader over what is left of an epoch's order, fed by a sampler that ends when it is told to.

What torch promises of a DataLoader holds for it: workers 0 to W - 1, `worker_init_fn`, `get_worker_info()`, pinning, the
dataset's exceptions, the end of all workers when nobody holds it any longer.
"""

from __future__ import annotations

import functools
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader

from autotune_loader.live.numbered import BatchesInLoop, Item, NumberedBatches, StreamBatches, unchanged
from autotune_loader.live.order import Order
from autotune_loader.live.seeds import LoopSeeds, WorkerSeeds, mixed
from autotune_loader.live.workers import PoolContext, disown, shield
from autotune_loader.machine.sandbox import channels
from autotune_loader.values.config import LoaderConfig

TORN = (ConnectionError, EOFError, FileNotFoundError, pickle.UnpicklingError)
"""What reading a batch raises whose worker has gone before it was read."""
DEATH_S = 0.2
"""So long may it take until the end of such a worker can be seen ..."""
POLL_S = 0.002
"""... for which one looks so often."""
END_S = 5.0
"""So long workers may take to end; torch waits as long."""

_Error = TypeVar("_Error", bound=BaseException)


class WorkersLostError(Exception):
    """Workers ended while their pool was being started."""

    def __init__(self, error: Exception, was_killed: bool) -> None:
        super().__init__(str(error))
        self.error = error
        """Torch's own."""
        self.was_killed = was_killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The user's parts of a loader, as a pool needs them."""

    dataset: Any
    is_stream: bool
    """Whether it is an IterableDataset."""
    batched: bool
    """Whether samples are collated; False where the dataset makes the batches."""
    batch_size: int | None
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    timeout: float
    context: BaseContext | str | None
    stages: bool
    """Whether workers are watched for where the time of a sample goes."""
    is_asked: bool
    """Whether workers were asked for; who waits for children, or for the end of a pipe, does not wait for others."""
    loop_seeds: LoopSeeds | None
    """Puts the training's own random state back; None leaves random numbers to torch."""

    def sent(self, kind: type[Any]) -> Any:
        """What workers are sent."""
        return kind(self.dataset, self.collate_fn, self.worker_init_fn, batched=self.batched, watches=self.stages)

    def made_here(self, item: Item) -> Any:
        """A batch, or what is raised in its place, of the training process."""
        batches = self.sent(NumberedBatches)
        batches.seeds = self.loop_seeds
        return batches.__getitems__(item)[0]


class PoolLoader(DataLoader[Any]):
    """A loader of a pool; more workers than cores were asked for, or measured."""

    def check_worker_number_rationality(self) -> None:
        """No warning."""


class Feed:
    """The sampler of a pool: the rest of an order, until it is closed."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.is_open = True

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self.is_open:
            raise StopIteration
        return next(self.order)


class Pool:
    """Workers with a configuration, started over an order.

    Args:
        parts: of the user.
        config: of the workers.
        order: of this epoch; of it an IterableDataset uses the seed only.
        number: pools of this epoch before: each gives its workers other seeds.
        look: makes a batch in the training process, given what makes it and the item.
        patience_s: workers that nobody asked for may take so long for a batch; for others the user's `timeout` says it.

    Attributes:
        here: what makes batches in the training process; None where workers do.
        receive: the next (batch, fetch, number, reads): see `numbered`; raises StopIteration after the last of a feed that
            was closed or ran dry.
        is_waiting: set by the loop while it is in `receive`: then, and only then, a lost worker interrupts it.

    Raises:
        WorkersLostError: a worker ended before all had been started.
    """

    def __init__(
        self,
        parts: Parts,
        config: LoaderConfig,
        order: Order,
        number: int,
        look: Callable[..., Any],
        patience_s: float = 0.0,
    ) -> None:
        self._patience_s = patience_s
        self._is_closed = True  # until it is open
        self.receive: Callable[[], Any] = _closed
        self._iterator: Any = None
        self._loader: Any = None
        self.config = config
        self.feed = Feed(order)
        self.here: BatchesInLoop | None = None
        self.is_waiting = self.is_in_main = threading.current_thread() is threading.main_thread()
        self._loss: BaseException | None = None
        self._is_hidden = False
        self._context = PoolContext(parts.context or config.multiprocessing_context)
        if config.num_workers:
            shield(self)
        self._loader = self._made(parts, order, number, look)
        self._iterator = self._started()
        self.receive = self._iterator.__next__
        if self._is_hidden:
            disown(self.processes)
        if config.num_workers:
            shield(self)  # torch sets its handler when it starts workers for the first time
        self.is_waiting = self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()  # while the handler still knows whose workers end

    @property
    def processes(self) -> list[Any]:
        """Those of its workers."""
        return self._context.processes

    def _made(self, parts: Parts, order: Order, number: int, look: Callable[..., Any]) -> Any:
        """A DataLoader, or what needs none: batches that the training process makes, and that nobody pins."""
        config = self.config
        arguments: dict[str, Any] = {"generator": torch.Generator(), "pin_memory": config.pin_memory}
        if number == 0:
            arguments["generator"].set_state(order.worker_state)  # torch draws the seed that a plain loader would draw
        else:
            arguments["generator"].manual_seed(mixed(order.seed, number) >> 1)
        if parts.is_stream:
            stream = parts.sent(StreamBatches)
            arguments |= {"batch_size": parts.batch_size, "drop_last": parts.drop_last, "collate_fn": stream.collate}
            return PoolLoader(stream, **arguments, **self._of_workers(parts, stream))
        batches = parts.sent(NumberedBatches)
        if config.num_workers:
            batches.seeds = WorkerSeeds() if parts.loop_seeds else None
            batches.is_on_trust = not parts.is_asked
            is_own = batches.is_on_trust and self._context.get_start_method() == "fork"
            batches.ends_with_parent = self._is_hidden = is_own and self.is_in_main
            # Torch's way by file names needs a socket of the process.
            is_by_name = torch.multiprocessing.get_sharing_strategy() != "file_descriptor"
            batches.foreign = {} if is_by_name or not is_own else channels()
            arguments |= {"batch_sampler": self.feed, **self._of_workers(parts, batches)}
            return PoolLoader(batches, **arguments, collate_fn=unchanged)
        batches.seeds = parts.loop_seeds
        self.here = here = BatchesInLoop(batches, self.feed, look)
        return PoolLoader(here, **arguments, batch_size=None, collate_fn=unchanged) if config.pin_memory else here

    def _of_workers(self, parts: Parts, sent: Any) -> dict[str, Any]:
        config = self.config
        if not config.num_workers:
            return {}
        return {
            "num_workers": config.num_workers,
            "prefetch_factor": config.prefetch_factor,
            "persistent_workers": config.persistent_workers,
            "in_order": config.in_order,
            "timeout": parts.timeout if parts.is_asked else self._patience_s,
            "worker_init_fn": sent.begin,
            "multiprocessing_context": self._context,
        }

    def _started(self) -> Any:
        try:
            return iter(self._loader)
        except Exception as error:
            if not self.has_lost(error):
                raise
            self._end_others()
            raise WorkersLostError(without_frames(error), self.was_killed) from None

    def take_up(self, order: Order) -> None:
        """Go on with another epoch's order, with the same workers."""
        self.feed.order, self.feed.is_open, self.is_waiting = order, True, self.is_in_main
        self._iterator = iter(self._loader)
        self.receive = self._iterator.__next__
        self.is_waiting = False

    @property
    def is_whole(self) -> bool:
        """Whether all its workers live."""
        return self._loss is None and not self._context.dead()

    def has_lost(self, error: BaseException) -> bool:
        """Whether an error in `receive` comes from the end of a worker."""
        deadline = time.monotonic() + (DEATH_S if isinstance(error, TORN) and self.processes else 0.0)
        while self._loss is None and not self._context.dead():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)  # a process closes its sockets shortly before its end can be seen
        return True

    @property
    def was_killed(self) -> bool:
        """Whether a worker was ended by SIGKILL, as by the kernel when memory runs out."""
        return any(process.exitcode == -signal.SIGKILL for process in self._context.dead())

    @property
    def was_left(self) -> bool:
        """Whether a worker has ended by itself, as by `sys.exit` in the dataset, which no other worker would survive."""
        return any(process.exitcode > 0 for process in self._context.dead())

    def take_note(self, error: BaseException) -> bool:
        """Called by the signal's handler; see `shield`."""
        named = re.findall(r"\d+", str(error))
        if self._loss is not None or not any(str(process.pid) in named for process in self._context.dead()):
            return False
        if not self._is_closed:
            # `_iterator` still holds torch's: it would end its workers here, in the handler.
            self._loss, self.receive = error, functools.partial(_raise, error)
        return True

    def close(self, *, is_lost: bool = False) -> None:
        """End the workers: politely, or at once where some are gone and the others' batches will be fetched again."""
        self.is_waiting, self.feed.is_open, self._is_closed = False, False, True
        if is_lost:
            self._end_others()
        last = [self.receive, self._iterator, self._loader]
        self.receive, self._iterator, self._loader = _closed, None, None
        if is_lost and self.config.pin_memory:
            # The pinning thread may wait for ever for the rest of a message; torch would wait for the thread.
            ender = threading.Thread(target=last.clear, daemon=True)
            ender.start()
            ender.join(END_S)
        else:
            last.clear()

    def _end_others(self) -> None:
        if self._loss is not None:
            without_frames(self._loss)
            self._loss = None
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                process.terminate()


def without_frames(error: _Error) -> _Error:
    """The error without traceback and causes, whose frames hold torch's iterator, and by it the workers and their queues."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _closed() -> NoReturn:
    raise StopIteration
