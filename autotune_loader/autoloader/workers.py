"""Worker processes: added, parked and replaced one by one; the loop takes the batch it wants from the one that has it.

    give ── socket of the least busy ──► worker ──► packet ── get(number)
    lost: its socket has ended ── what it had is put back into the order ── another one is started in its place

Each has a socket of its own and nothing is shared, so that one that is killed holds no lock and takes nobody along.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

from torch.utils.data._utils.pin_memory import pin_memory

from autotune_loader.autoloader import transport
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.parts import Prepared
from autotune_loader.autoloader.work import Sent, Times, work
from autotune_loader.diagnosis import Finding, Kept

END_S = 1.0
"""Workers that have not ended by themselves after this are killed."""
MOST_LOSSES = 3
"""After so many losses without a batch in between it is not tried again."""

logger = logging.getLogger("autotune_loader.autoloader")


class GivenUpError(RuntimeError):
    """A worker did not deliver in time."""

    def __init__(self, message: str, why: Finding) -> None:
        super().__init__(message)
        self.why = why


class LostError(GivenUpError):
    """Workers were lost again and again."""


class Made(NamedTuple):
    """A batch of a worker's, or the exception (`ExceptionWrapper`) that it had instead."""

    batch: Any
    times: Times
    worker: int
    changed: str | None
    """What fetching has changed in the worker."""


@dataclass(slots=True, eq=False)
class Worker:
    process: Any
    end: socket.socket
    number: int
    has: list[int] = field(default_factory=list)
    """Numbers of the batches that it is to deliver, in this order."""
    turn: int = 0
    """Round of its jobs: what it delivers of an earlier one was taken back."""
    fetched: int = 0
    is_like_new: bool = True
    """Whether nothing has changed in it since its first fetch, which may make something ready."""


class Workers:
    """The workers of one loader.

    Args:
        sent: what they fetch with.
        context: of `multiprocessing`, or the name of a start method.
        asked: `num_workers` of the loader; what `get_worker_info()` tells, if it has no more.
        prepared: what the loop's own fetches have made ready, which they begin without.
        pins: whether batches are pinned.

    Attributes:
        active: workers that are given work.
        lost: workers that were lost.
        start_s: what starting one took.
    """

    def __init__(self, sent: Sent, context: Any, *, asked: int, prepared: Prepared, pins: bool) -> None:
        self.sent, self._asked, self._prepared = sent, asked, prepared
        self._context: Any = get_context(context) if context is None or isinstance(context, str) else context
        self._all: list[Worker] = []
        self._ready: dict[int, Made | Future[Made]] = {}
        self._pinner = ThreadPoolExecutor(1, "pin-memory") if pins else None
        self._order: Order | None = None
        self._initial_seed = self._losses = 0
        self._patience_s = 0.0
        self._prefetch = 2
        self.active = self.lost = 0
        self.start_s: float | None = None
        _living.add(self)

    def __len__(self) -> int:
        return len(self._all)

    def __del__(self) -> None:
        try:  # noqa: SIM105 - modules may be gone: the interpreter ends
            self.close()
        except Exception:  # noqa: S110
            pass

    @property
    def processes(self) -> list[Any]:
        return [worker.process for worker in self._all]

    @property
    def are_like_new(self) -> bool:
        """Whether they cannot be told from others that are started now."""
        return all(worker.is_like_new and worker.process.is_alive() for worker in self._all)

    def makes(self, number: int) -> bool:
        """Whether the batch of this number is theirs to deliver."""
        if not self._ready and not any(worker.has for worker in self._all):
            self._give_all()
        return number in self._ready or any(number in each.has for each in self._all)

    def begin(self, order: Order, initial_seed: int) -> None:
        """From now on they make the batches of this epoch; `initial_seed` is what `torch.initial_seed()` tells there."""
        self.rest()
        self._order, self._initial_seed = order, initial_seed

    def rest(self) -> None:
        """Nothing of what they have is wanted any more; it is put back."""
        ready, self._ready = list(self._ready), {}
        self._take_back(self._all, ready)
        self._order = None

    def resize(self, count: int, prefetch: int) -> None:
        """So many are given work from now on; others are parked, and deliver what they have."""
        begun, before = time.monotonic(), len(self._all)
        while len(self._all) < count:
            self._all.append(self._started(len(self._all)))
        if started := len(self._all) - before:
            self.start_s = (time.monotonic() - begun) / started
        self.active, self._prefetch = count, prefetch
        self._give_all()

    def wait_at_most(self, seconds: float) -> None:
        """A worker that takes longer for a batch is given up; 0 waits for ever."""
        if seconds != self._patience_s:
            self._patience_s = seconds
            for worker in self._all:
                transport.within(worker.end, seconds)

    def _started(self, number: int) -> Worker:
        ours, theirs = transport.pair()
        seed, context = 0 if self._order is None else self._order.seed, self._context
        arguments = theirs, self.sent, number, max(self._asked, number + 1), seed
        process = context.Process(target=work, args=arguments, name=f"AutoLoader-{number}", daemon=True)
        try:
            with self._prepared.undone(), warnings.catch_warnings():
                # Of threads, as torch's forks.
                warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        transport.within(ours, self._patience_s)
        return Worker(process, ours, number)

    def _give_all(self) -> None:
        """Whoever has the fewest batches gets the next one, so that all have as many."""
        while (order := self._order) is not None:
            worker = min(self._all[: self.active], key=lambda each: len(each.has), default=None)
            item = None if worker is None or len(worker.has) >= self._prefetch else next(order, None)
            if worker is None or item is None:
                return
            worker.has.append(item[0])
            with contextlib.suppress(OSError):  # its end is found where it is waited for
                job = worker.turn, item[0], order.seed, self._initial_seed, item[1]
                transport.send(worker.end, job, is_plain=True)

    def get(self, number: int) -> Made:
        """The batch of this number.

        Raises:
            GivenUpError: its worker did not deliver in time, or workers were lost again and again.
            KeyError: nobody makes it: it was put back.
            Exception: a batch could not be received; it is put back.
        """
        while number not in self._ready:
            worker = next((each for each in self._all if number in each.has), None)
            if worker is None:
                raise KeyError(number)
            self._receive(worker, 0)
        ready = self._ready.pop(number)
        if self._pinner is not None:
            self._receive_ahead()
        return ready.result() if isinstance(ready, Future) else ready

    def _receive(self, worker: Worker, flags: int) -> None:
        try:
            turn, number, batch, times, changed = transport.receive(worker.end, flags)
            worker.fetched += 1
            if worker.fetched == 1:
                changed = None
            worker.is_like_new = worker.is_like_new and changed is None
            if turn == worker.turn:
                made = Made(batch, times, worker.number, changed)
                worker.has.remove(number)
                self._ready[number] = made if self._pinner is None else self._pinner.submit(_pinned, made)
                self._losses = 0
                self._give_all()
        except BlockingIOError:
            if flags:
                raise
            patience_s, why = self._patience_s, Kept.WORKER_SILENT(silent=self._patience_s)
            raise GivenUpError(f"DataLoader timed out after {patience_s:g} seconds", why) from None
        except (EOFError, ConnectionError):
            self._replace(worker)
        except BaseException:  # a signal's handler may raise in the midst
            self._take_back([worker])
            raise

    def _receive_ahead(self) -> None:
        """So that the next batches are pinned while the loop steps."""
        for worker in self._all:
            with contextlib.suppress(BlockingIOError):
                while worker.has:
                    self._receive(worker, socket.MSG_DONTWAIT)

    def _replace(self, worker: Worker) -> None:
        self.lost += 1
        self._losses += 1
        self._take_back([worker])
        _end([worker])
        if self._losses >= MOST_LOSSES:
            raise LostError(_words(worker.process), Kept.WORKERS_LOST(error=_words(worker.process)))
        logger.warning("%s; another one takes its place", _words(worker.process))
        self._all[worker.number] = self._started(worker.number)
        self._give_all()

    def _take_back(self, workers: list[Worker], numbers: list[int] | None = None) -> None:
        numbers = numbers or []
        for worker in workers:
            if worker.has:
                numbers += worker.has
                worker.has, worker.turn = [], worker.turn + 1
                with contextlib.suppress(OSError):
                    transport.send(worker.end, (worker.turn, None), is_plain=True)
        if self._order is not None:
            self._order.put_back(numbers)

    def close(self) -> None:
        self.rest()
        ending, self._all, self.active = self._all, [], 0
        _end(ending)
        if self._pinner is not None:
            self._pinner.shutdown(wait=False)

    def forget(self) -> None:
        """In a fork of the user's: they are its parent's, and what they have is fetched here."""
        for worker in self._all:
            worker.end.close()
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
        self._take_back(self._all, list(self._ready))
        self._all, self._ready, self.active = [], {}, 0


_living: weakref.WeakSet[Workers] = weakref.WeakSet()


def _in_fork() -> None:
    for workers in list(_living):
        workers.forget()


os.register_at_fork(after_in_child=_in_fork)


def _end(workers: list[Worker]) -> None:
    """End them, by force after a while. `join` would not: their sentinels are pipes, which they have cut."""
    for worker in workers:
        worker.end.close()
    deadline = time.monotonic() + END_S
    for process in (worker.process for worker in workers):
        while process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if process.exitcode is None:
            process.kill()
        process.join()


def _words(process: Any) -> str:
    """As torch says it."""
    code = process.exitcode
    if code is not None and code < 0:
        return f"DataLoader worker (pid {process.pid}) is killed by signal: {signal.strsignal(-code)}."
    return f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"


def _pinned(made: Made) -> Made:
    return made._replace(batch=pin_memory(made.batch))
