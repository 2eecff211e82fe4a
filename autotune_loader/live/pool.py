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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, TypeVar

import torch

from autotune_loader.live.numbered import (
    BatchesInLoop,
    Item,
    NumberedCollate,
    NumberedDataset,
    NumberedSamples,
    StreamCollate,
)
from autotune_loader.live.order import Order
from autotune_loader.live.seeds import LoopSeeds, WorkerSeeds, mixed
from autotune_loader.live.workers import PoolContext, shield
from autotune_loader.machine.shm import remove_segments_of, segments
from autotune_loader.pipeline.build import build_loader
from autotune_loader.pipeline.tracing import TracedEpoch, TracedWorkerInit
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
    loop_seeds: LoopSeeds | None
    """Puts the training's own random state back; None leaves random numbers to torch."""


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

    Attributes:
        receive: the next (batch, fetch, number); raises StopIteration after the last of a feed that was closed or ran dry.
        is_waiting: set by the loop while it is in `receive`: then, and only then, a lost worker interrupts it.

    Raises:
        TypeError: the parts cannot be sent to workers that do not share this process' memory.
        ValueError: this process may not have children.
        WorkersLostError: a worker ended before all had been started.
    """

    def __init__(self, parts: Parts, config: LoaderConfig, order: Order, number: int) -> None:
        self._segments_before = segments()
        self._is_closed = True  # until it is open
        refuse_children_of_daemons(config)
        self.config = config
        self.feed = Feed(order)
        self.is_waiting = True
        self._loss: BaseException | None = None
        self._context = PoolContext(parts.context or config.multiprocessing_context)
        shield(self)
        with warnings.catch_warnings():
            # What cannot be pickled is told below; more workers than cores were measured, or asked for.
            warnings.filterwarnings("ignore", message="Got pickle error|This DataLoader will create")
            self._loader = self._loader_of(parts, order, number)
            self._iterator: Any = self._started(parts)
        self.receive: Callable[[], Any] = self._iterator.__next__
        shield(self)  # torch sets its handler when it starts workers for the first time
        self.is_waiting = self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()  # while the handler still knows whose workers end

    def _loader_of(self, parts: Parts, order: Order, number: int) -> Any:
        """A DataLoader, or what needs none: batches that the training process makes, and that nobody pins."""
        data = self._data(parts)
        made = data["dataset"]
        if isinstance(made, BatchesInLoop) and not self.config.pin_memory:
            return made
        return build_loader(**self._arguments(parts, order, number), **data)

    def _arguments(self, parts: Parts, order: Order, number: int) -> dict[str, Any]:
        generator, workers = torch.Generator(), self.config.num_workers
        if number == 0:
            generator.set_state(order.worker_state)  # torch draws from it the seed that a plain loader would draw
        else:
            generator.manual_seed(mixed(order.seed, number) >> 1)
        arguments: dict[str, Any] = {"config": self.config, "generator": generator}
        if workers:
            arguments |= {
                "worker_init_fn": TracedWorkerInit(parts.worker_init_fn, parts.stages),
                "timeout": parts.timeout,
            }
            arguments |= {"multiprocessing_context": self._context}
        return arguments

    def _data(self, parts: Parts) -> dict[str, Any]:
        if parts.is_stream:
            collate = StreamCollate(parts.collate_fn, parts.batched)
            batching = {"batch_size": parts.batch_size, "drop_last": parts.drop_last}
            return {"dataset": TracedEpoch(parts.dataset), "collate_fn": collate, **batching}
        if not self.config.num_workers:
            batches = BatchesInLoop(parts.dataset, parts.collate_fn, parts.batched, self.feed, parts.loop_seeds)
            return {"dataset": batches, "batch_size": None, "collate_fn": _unchanged}
        return {
            "dataset": (NumberedDataset if parts.batched else NumberedSamples)(
                parts.dataset, WorkerSeeds() if parts.loop_seeds else None
            ),
            "collate_fn": NumberedCollate(parts.collate_fn, parts.batched),
            **({"batch_sampler": self.feed} if parts.batched else {"sampler": self.feed, "batch_size": None}),
        }

    def _started(self, parts: Parts) -> Any:
        method = self._context.get_start_method()
        try:
            iterator = iter(self._loader)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            if self._context.processes and method != "fork":
                raise TypeError(
                    f"{type(parts.dataset).__name__}, its collate_fn or worker_init_fn cannot be sent to workers started by "
                    f"{method!r}: {error}; num_workers=0 or multiprocessing_context='fork' would work"
                ) from error
            raise
        except Exception as error:
            if not self.has_lost(error):
                raise
            self._end_others()
            raise WorkersLostError(without_frames(error), self.was_killed) from None
        return iterator

    def take_up(self, order: Order) -> None:
        """Go on with another epoch's order, with the same workers."""
        self.feed.order, self.feed.is_open, self.is_waiting = order, True, True
        self._iterator = iter(self._loader)
        self.receive = self._iterator.__next__
        self.is_waiting = False

    @property
    def is_whole(self) -> bool:
        """Whether all its workers live."""
        return self._loss is None and not self._context.dead()

    def has_lost(self, error: BaseException) -> bool:
        """Whether an error in `receive` comes from the end of a worker; else it is the dataset's own."""
        is_torn = isinstance(error, TORN) and "in DataLoader worker process" not in str(error)
        deadline = time.monotonic() + (DEATH_S if is_torn and self._context.processes else 0.0)
        while self._loss is None and not self._context.dead():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)  # a process closes its sockets shortly before its end can be seen
        return True

    @property
    def was_killed(self) -> bool:
        """Whether a worker was ended by SIGKILL, as by the kernel when memory runs out."""
        return any(process.exitcode == -signal.SIGKILL for process in self._context.dead())

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
        if is_lost:
            gone = [process.pid for process in self._context.dead() if process.pid is not None]
            remove_segments_of(gone, self._segments_before)

    def _end_others(self) -> None:
        if self._loss is not None:
            without_frames(self._loss)
            self._loss = None
        for process in self._context.processes:
            if process.pid is not None and process.exitcode is None:
                process.terminate()


def without_frames(error: _Error) -> _Error:
    """The error without traceback and causes, whose frames hold torch's iterator, and by it the workers and their queues."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def refuse_children_of_daemons(config: LoaderConfig) -> None:
    """Raise a ValueError that helps where multiprocessing would only assert."""
    if config.num_workers and current_process().daemon:
        raise ValueError(
            f"num_workers={config.num_workers} needs child processes, which a daemonic process such as this one "
            f"({current_process().name}) may not have; num_workers=0 would work"
        )


def _unchanged(batch: Any) -> Any:
    return batch


def _raise(error: BaseException) -> NoReturn:
    raise error


def _closed() -> NoReturn:
    raise StopIteration
