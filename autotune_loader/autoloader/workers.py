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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.parts import Change, Noted, undone
from autotune_loader.autoloader.work import Sent, work
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.machine import messages
from autotune_loader.pipeline.loop_log import Fetch

END_S = 1.0
"""Workers that have not ended by themselves after this are killed."""
MOST_LOSSES = 3
"""After so many losses without a batch in between it is not tried again."""

logger = logging.getLogger("autotune_loader.autoloader")


class GivenUpError(RuntimeError):
    """Workers cannot go on."""

    def __init__(self, message: str, why: Finding) -> None:
        super().__init__(message)
        self.why = why


Made = tuple[Any, Fetch]
"""A batch of a worker's, or the exception (`ExceptionWrapper`) that it had instead, and the history of its making"""


@dataclass(slots=True, eq=False)
class Worker:
    process: Any
    end: socket.socket
    number: int
    has: list[int] = field(default_factory=list)
    """Numbers of the batches that it is to deliver, in this order."""
    turn: int = 0
    """Round of its jobs: what it delivers of an earlier one was taken back."""


class Workers:
    """The workers of one loader.

    Args:
        sent: what they fetch with.
        context: of `multiprocessing`, or the name of a start method.
        asked: `num_workers` of the loader; what `get_worker_info()` tells, if it has no more.
        began_with: the user's parts as they are now.
        ready: what the loop's own fetches have made ready, which they begin without.
        pins: whether batches are pinned.

    Attributes:
        active: workers that are given work.
        patience_s: a worker that takes longer for a batch is given up; 0 waits for ever.
        start_s: what starting one took.
        changed: what fetching has changed in a worker since its first batch.
    """

    def __init__(
        self, sent: Sent, context: Any, *, asked: int, began_with: Noted, ready: Sequence[Change], pins: bool
    ) -> None:
        self.sent, self.began_with, self._asked, self._ready_made = sent, began_with, asked, ready
        self._context: Any = get_context(context) if context is None or isinstance(context, str) else context
        self._all: list[Worker] = []
        self._ready: dict[int, Made | Future[Made]] = {}
        self._pinner = ThreadPoolExecutor(1, "pin-memory") if pins else None
        self._order: Order | None = None
        self._initial_seed = self._losses = self._prefetch = self.active = 0
        self.patience_s = self.start_s = 0.0
        self.changed: str | None = None
        _living.add(self)

    def __del__(self) -> None:
        try:  # noqa: SIM105 - modules may be gone: the interpreter ends
            self.close()
        except Exception:  # noqa: S110
            pass

    @property
    def processes(self) -> list[Any]:
        return [worker.process for worker in self._all]

    def begin(self, order: Order | None, initial_seed: int = 0) -> None:
        """From now on they make the batches of this epoch, or of none; `torch.initial_seed()` tells this there."""
        self._take_back(self._all, list(self._ready))
        self._ready, self._order, self._initial_seed = {}, order, initial_seed
        for worker in self._all if order is not None else ():  # what is left of another epoch would fill its socket
            with contextlib.suppress(Exception):
                while True:
                    messages.receive(worker.end, None)

    def resize(self, count: int, prefetch: int) -> None:
        """So many are given work from now on; others are parked, and deliver what they have."""
        begun, before = time.monotonic(), len(self._all)
        while len(self._all) < count:
            self._all.append(self._started(len(self._all)))
        if started := len(self._all) - before:
            self.start_s = (time.monotonic() - begun) / started
        self.active, self._prefetch = count, prefetch
        self._give()

    def _started(self, number: int) -> Worker:
        ours, theirs = messages.pair()
        seed = 0 if self._order is None else self._order.seed
        arguments = theirs, self.sent, number, max(self._asked, number + 1), seed
        process = self._context.Process(target=work, args=arguments, name=f"AutoLoader-{number}", daemon=True)
        try:
            with undone(self._ready_made), warnings.catch_warnings():
                # Of threads, as torch's forks.
                warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Worker(process, ours, number)

    def _give(self) -> None:
        """Whoever has the fewest batches gets the next one, so that all have as many."""
        while (order := self._order) is not None and order.failed is None:
            worker = min(self._all[: self.active], key=lambda each: len(each.has), default=None)
            if worker is None or len(worker.has) >= self._prefetch:
                return
            try:
                item = next(order)
            except Exception as error:
                order.failed = None if isinstance(error, StopIteration) else error
                return
            worker.has.append(item[0])
            with contextlib.suppress(OSError):  # its end is found where it is waited for
                job = worker.turn, item[0], order.seed, self._initial_seed, item[1]
                messages.send(worker.end, job, is_plain=True)

    def get(self, number: int) -> Made | None:
        """The batch of this number; None where it is not theirs to deliver, or was put back.

        Raises:
            GivenUpError: its worker did not deliver in time, or workers were lost again and again; or nobody asked for workers,
                and what they have a copy of was changed.
            Exception: a batch could not be received; it is put back.
        """
        if not self._ready and not any(worker.has for worker in self._all):
            self._give()
        if not self._asked and (what := self.began_with.changed()) is not None:
            raise GivenUpError(what, Kept.TRAINING_CHANGES(what=what))
        while number not in self._ready:
            worker = next((each for each in self._all if number in each.has), None)
            if worker is None:
                return None
            self._receive(worker, self.patience_s)
        ready = self._ready.pop(number)
        for worker in self._all if self._pinner is not None else ():  # the next ones are pinned while the loop steps
            with contextlib.suppress(BlockingIOError):
                while worker.has:
                    self._receive(worker, None)
        return ready.result() if isinstance(ready, Future) else ready

    def _receive(self, worker: Worker, seconds: float | None) -> None:
        try:
            turn, number, batch, times, changed = messages.receive(worker.end, seconds)
            self.changed = self.changed or changed
            if changed is not None and not self._asked:
                raise GivenUpError(changed, Kept.DATASET_CHANGES(what=changed))
            if turn == worker.turn:
                made = batch, (worker.number, *times)
                self._ready[number] = made if self._pinner is None else self._pinner.submit(_pinned, *made)
                worker.has.remove(number)
                self._losses = 0
                self._give()
        except BlockingIOError:
            if seconds is None:
                raise
            why = Kept.WORKER_SILENT(silent=seconds)
            raise GivenUpError(f"DataLoader timed out after {seconds:g} seconds", why) from None
        except (EOFError, ConnectionError):
            self._replace(worker)
        except BaseException:  # a signal's handler may raise in the midst
            self._take_back([worker])
            raise

    def _replace(self, worker: Worker) -> None:
        self._losses += 1
        self._take_back([worker])
        _end([worker])
        words = _words(worker.process)
        if self._losses >= MOST_LOSSES:
            raise GivenUpError(words, Kept.WORKERS_LOST(error=words))
        logger.warning("%s; another one takes its place", words)
        self._all[worker.number] = self._started(worker.number)
        self._give()

    def _take_back(self, workers: Sequence[Worker], ready: Sequence[int] = ()) -> None:
        numbers = [*ready, *(number for worker in workers for number in worker.has)]
        for worker in (each for each in workers if each.has):
            worker.has, worker.turn = [], worker.turn + 1
            with contextlib.suppress(OSError):
                messages.send(worker.end, (worker.turn, None), is_plain=True)
        if self._order is not None:
            self._order.put_back(numbers)

    def close(self) -> None:
        self.begin(None)
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


def _end(workers: Sequence[Worker]) -> None:
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


def _pinned(batch: Any, fetch: Fetch) -> Made:
    return pin_memory(batch), fetch
