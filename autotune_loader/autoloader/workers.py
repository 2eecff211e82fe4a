"""Worker processes: added, parked and replaced one by one; the loop takes the batch it wants from the one that has it.

    give ── socket of the least busy ──► worker ──► packet ── get(number)
    lost: its socket has ended ── what it had is put back into the order ── another one is started in its place

Each has a socket of its own and nothing is shared, so that one that is killed holds no lock and takes nobody along.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import select
import signal
import socket
import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from autotune_loader.autoloader import transport
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.parts import Undo
from autotune_loader.autoloader.seeds import mixed
from autotune_loader.autoloader.work import CANCELLED, Sent, work

END_S = 1.0
"""Workers that have not ended by themselves after this are killed."""
SETTLED_FETCHES = 4
"""A worker that changed something in its first fetch only, and has made so many batches, is as good as a fresh one."""

MOST_LOSSES = 3
"""After so many losses without a batch in between it is not tried again."""

logger = logging.getLogger("autotune_loader.autoloader")
_tickets = itertools.count()


class LostError(RuntimeError): ...


class SilentError(RuntimeError): ...


@dataclass(slots=True)
class Made:
    """A batch of a worker's, or the exception (`ExceptionWrapper`) that it had instead."""

    batch: Any
    times: tuple[float, float, float, float]
    """fetch_start, fetch_end, collate_end, cpu_s"""
    worker: int
    changed: str | None
    """What fetching has changed in the worker, after its first fetch, which may make something ready."""


@dataclass(slots=True, eq=False)
class Worker:
    process: Any
    end: socket.socket
    number: int
    has: dict[int, int] = field(default_factory=dict)
    """Numbers of the batches that it is to deliver, by ticket."""
    fetched: int = 0
    last_change: int = 0
    """The fetch, from 1, that changed something; 0 where none did."""

    @property
    def is_like_new(self) -> bool:
        """Whether it cannot be told from one that is started now."""
        settled = self.last_change == 1 and self.fetched >= SETTLED_FETCHES
        return (not self.last_change or settled) and self.process.is_alive()


class Workers:
    """The workers of one loader.

    Args:
        sent: what they fetch with.
        context: of `multiprocessing`, or the name of a start method.
        asked: `num_workers` of the loader; what `get_worker_info()` tells, if it has no more.
        undo: what the loop's own fetches have made, which they begin without.
        pins: whether batches are pinned.
    """

    def __init__(self, sent: Sent, context: Any, *, asked: int, undo: Undo, pins: bool) -> None:
        self.sent, self._asked, self._undo = sent, asked, undo
        self._context = get_context(context) if context is None or isinstance(context, str) else context
        self._all: list[Worker] = []
        self._where: dict[int, Worker] = {}
        """Who makes the batch of this number."""
        self._ready: dict[int, Made | Future[Made]] = {}
        self._pinner = ThreadPoolExecutor(1, "pin-memory") if pins else None
        self._order: Order | None = None
        self._initial_seed = 0
        self._losses = 0
        self._patience_s = 0.0
        self.active = self.lost = 0
        """Workers that are given work; that were lost."""
        self.prefetch = 2
        """Batches that each may have in hand."""
        self.start_s: float | None = None
        """What starting one took."""
        _living.add(self)

    def __len__(self) -> int:
        return len(self._all)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends
            self.close()

    @property
    def processes(self) -> list[Any]:
        return [worker.process for worker in self._all]

    @property
    def in_hand(self) -> int:
        return len(self._where) + len(self._ready)

    def makes(self, number: int, *, in_order: bool = True) -> bool:
        """Whether the batch of this number, or any where order does not matter, is theirs to deliver."""
        if self.active and not self.in_hand:
            self._give_all()
        return number in self._where or number in self._ready or (not in_order and self.in_hand > 0)

    @property
    def are_like_new(self) -> bool:
        """Whether they cannot be told from others that are started now."""
        return all(worker.is_like_new for worker in self._all)

    def begin(self, order: Order, initial_seed: int) -> None:
        """From now on they make the batches of this epoch; `initial_seed` is what `torch.initial_seed()` tells there."""
        self.rest()
        self._order, self._initial_seed = order, initial_seed

    def rest(self) -> None:
        """Nothing of what they have is wanted any more; it is put back."""
        self._take_back(self._all)
        self._order = None

    def resize(self, count: int, prefetch: int) -> None:
        """So many are given work from now on; others are parked, and deliver what they have."""
        begun, before = time.monotonic(), len(self._all)
        self.prefetch = prefetch
        while len(self._all) < count:
            self._all.append(self._started(len(self._all)))
        if started := len(self._all) - before:
            self.start_s = (time.monotonic() - begun) / started
        self.active = count
        self._give_all()

    def wait_at_most(self, seconds: float) -> None:
        """A worker that takes longer for a batch is given up; 0 waits for ever."""
        if seconds != self._patience_s:
            self._patience_s = seconds
            for worker in self._all:
                transport.within(worker.end, seconds)

    def _started(self, number: int) -> Worker:
        ours, theirs = transport.pair()
        seed = 0 if self._order is None else self._order.seed
        context: Any = self._context
        arguments = theirs, self.sent, number, max(self._asked, number + 1), seed
        try:
            with self._undo.undone(), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*fork", category=DeprecationWarning
                )  # of threads, as torch's forks
                process = context.Process(target=work, args=arguments, name=f"AutoLoader-{number}", daemon=True)
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        transport.within(ours, self._patience_s)
        return Worker(process, ours, number)

    def _give_all(self) -> None:
        while working := [each for each in self._all[: self.active] if len(each.has) < self.prefetch]:
            if not self._give(min(working, key=lambda each: len(each.has))):
                return

    def _give(self, worker: Worker) -> bool:
        order = self._order
        item = None if order is None else next(order, None)
        if order is None or item is None:
            return False
        ticket, number = next(_tickets), item[0]
        worker.has[ticket], self._where[number] = number, worker
        with contextlib.suppress(OSError):  # its end is found where it is waited for
            transport.send_plain(worker.end, (ticket, mixed(order.seed, number), self._initial_seed, item[1]))
        return True

    def get(self, number: int, *, in_order: bool = True) -> tuple[int, Made]:
        """The batch of this number, or where order does not matter one that is ready; with its number.

        Raises:
            SilentError: its worker did not deliver in time.
            LostError: workers were lost again and again.
            KeyError: nobody makes it: it was put back.
            Exception: a batch could not be received; it is put back.
        """
        while True:
            if not in_order:
                number = self._any_ready(number)
            if (ready := self._ready.pop(number, None)) is not None:
                if self._pinner is not None:
                    self._receive_ahead()
                return number, ready.result() if isinstance(ready, Future) else ready
            self._receive(self._where[number], 0)

    def _receive(self, worker: Worker, flags: int) -> None:
        try:
            ticket, times, changed, batch = transport.receive(worker.end, flags)
            worker.fetched += 1
            worker.last_change = worker.last_change if changed is None else worker.fetched
            number = worker.has.pop(ticket, None)
            if number is None:  # it was taken back
                return
            made = Made(batch, times, worker.number, changed if worker.fetched > 1 else None)
            self._ready[number] = made if self._pinner is None else self._pinner.submit(_pinned, made)
            del self._where[number]
            self._losses = 0
            if worker.number < self.active:
                self._give(worker)
        except BlockingIOError:
            if not flags:
                raise SilentError(f"worker {worker.process.pid} delivers nothing") from None
            raise
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

    def _any_ready(self, number: int) -> int:
        if not self._ready:
            busy = [worker for worker in self._all if worker.has]
            readable = select.select([worker.end for worker in busy], [], [], self._patience_s or None)[0]
            return next((next(iter(worker.has.values())) for worker in busy if worker.end in readable), number)
        return next(iter(self._ready))

    def _replace(self, worker: Worker) -> None:
        self.lost += 1
        self._losses += 1
        self._take_back([worker])
        worker.end.close()
        _wait_for([worker])
        if self._losses >= MOST_LOSSES:
            raise LostError(_words(worker.process))
        logger.warning("%s; another one takes its place", _words(worker.process))
        self._all[worker.number] = self._started(worker.number)
        self._give_all()

    def _take_back(self, workers: list[Worker]) -> None:
        numbers = []
        if workers is self._all:
            numbers, self._ready = list(self._ready), {}
        for worker in workers:
            numbers += worker.has.values()
            if worker.has:
                worker.has = {}
                with contextlib.suppress(OSError):
                    transport.send_plain(worker.end, (CANCELLED,))
        for number in numbers:
            self._where.pop(number, None)
        if self._order is not None:
            self._order.put_back(numbers)

    def close(self) -> None:
        self.rest()
        ending, self._all, self.active = self._all, [], 0
        for worker in ending:
            worker.end.close()
        _wait_for(ending)
        if self._pinner is not None:
            self._pinner.shutdown(wait=False)

    def forget(self) -> None:
        """In a fork of the user's: they are its parent's, and what they have is fetched here."""
        for worker in self._all:
            worker.end.close()
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
        if self._order is not None:
            self._order.put_back([*self._where, *self._ready])
        self._all, self._where, self._ready, self.active = [], {}, {}, 0


_living: weakref.WeakSet[Workers] = weakref.WeakSet()


def _in_fork() -> None:
    for workers in list(_living):
        workers.forget()


os.register_at_fork(after_in_child=_in_fork)


def _wait_for(workers: list[Worker]) -> None:
    """Until they have ended, by force after a while. `join` would not: their sentinels are pipes, which they have cut."""
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
    made.batch = pin_memory(made.batch)
    return made
