"""An iterator of torch's, or of AutoLoader's, that tells how long its loop waits: of a subclass with a `__next__` of its own.

next(iterator) ── ask ── the iterator's own __next__ ── receive      StopIteration ── end
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from autotune_loader.machine.processes import PROC, process_use, queued_s
from autotune_loader.pipeline.batches import BatchShape, samples_in
from autotune_loader.watch.script_loader import CpuTimes, ScriptLoader

WATCH = "_autotune_loader_watch"
"""Attribute of an iterator that is watched."""
LOOK_EVERY_S = 0.01
"""So often a batch is looked at more closely: with its CPU times, which take 10 us."""
READ_EVERY_S = 0.5
"""So often the CPU times of this process and of torch's workers are read: 20 us each."""

log = logging.getLogger(__name__)


def thread_times() -> CpuTimes:
    """Of the calling thread."""
    return CpuTimes(time.thread_time(), queued_s("thread-self"))


def process_times(pid: int) -> CpuTimes:
    """Of a process: on the cores all of its threads, in the queue its main one."""
    use = process_use(PROC / str(pid))
    return CpuTimes(0.0 if use is None else use.cpu_s, queued_s(str(pid)))


class Watch:
    """Whoever takes batches from one iterator of a loader, epoch after epoch; `begun` is when it began to be made."""

    workers: Sequence[Any] = ()
    """Processes of torch's that make the batches."""

    def __init__(
        self,
        known: ScriptLoader,
        loader: Any,
        begun: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], CpuTimes] = thread_times,
    ) -> None:
        self._known, self._clock, self._cpu_clock = known, clock, cpu_clock
        size, is_stream = getattr(loader, "batch_size", None), getattr(loader, "_dataset_kind", 1) == 1
        self._size = size if isinstance(size, int) else 0
        self._samples = 0 if is_stream or not self._size else _length_of(getattr(loader, "sampler", None))
        self._begin(begun)

    def _begin(self, now: float) -> None:
        self._loop, self._is_started, self._left = self._known.log.begin(now), False, self._samples
        self._asked_cpu: CpuTimes | None = None
        self._reading: tuple[float, int, list[CpuTimes]] | None = None
        self._next_reading_s = now

    @property
    def is_running(self) -> bool:
        """Whether an epoch is under way."""
        return not self._loop.is_over

    def begin(self) -> None:
        """An epoch begins to be made; the first one did so before."""
        if self._is_started:
            self._begin(self._clock())

    def started(self) -> None:
        """Workers of the epoch have been started, or those that were kept have been fed: the loop was held up meanwhile."""
        if not self._is_started:
            self._is_started = True
            self._loop.started(self._clock())

    def take(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """The next batch, for which the loop has asked, its step being done."""
        loop, asked = self._loop, self._clock()
        loop.ask(asked)
        if asked >= self._known.next_look_s:
            self._look(asked)
        try:
            batch = fetch(iterator)
        except StopIteration:
            loop.end(self._clock())
            raise
        received, size = self._clock(), self._size
        if self._left >= size > 0:
            self._left -= size
        else:  # the last one of an epoch, or torch does not count them out
            size, self._left = self._left or _samples_in(batch) or size or 1, 0
        loop.receive(received, size)
        if self._asked_cpu is not None:
            self._clocked(received, batch, self._asked_cpu)
        return batch

    def _look(self, now: float) -> None:
        """Now and then: whether something can be said of the loader, and what CPU its batches take."""
        self._known.next_look_s = now + LOOK_EVERY_S
        if self._known.first_look is not None:
            self._known.look()
        self._asked_cpu = self._cpu_clock()

    def _clocked(self, now: float, batch: Any, asked: CpuTimes) -> None:
        """A batch whose CPU time was clocked."""
        self._known.in_loop.add(1, asked, self._cpu_clock())
        self._asked_cpu = None
        try:
            if self._known.shape is None:
                self._known.shape = BatchShape.of(batch)
            if now >= self._next_reading_s:
                self._next_reading_s = now + READ_EVERY_S
                self._read(now)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a batch was not looked at", exc_info=True)

    def _read(self, now: float) -> None:
        """What CPU this process and torch's workers took since the last reading; before an epoch's first one they started."""
        times = [process_times(pid) for pid in (os.getpid(), *(worker.pid for worker in self.workers))]
        if self._reading is not None:
            then, batches, earlier = self._reading
            self._known.read_s += now - then
            self._known.busy_s += sum(after.cpu_s - before.cpu_s for before, after in zip(earlier, times, strict=True))
            for before, after in zip(earlier[1:], times[1:], strict=True):
                self._known.in_workers.add((self._loop.batches - batches) / len(self.workers), before, after)
        self._reading = now, self._loop.batches, times


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except Exception:  # it has none, or does not know
        return 0


def _samples_in(batch: Any) -> int | None:
    try:
        return samples_in(batch)
    except Exception:  # somebody's own class of batches
        return None


def watch_iterator(iterator: Any, known: ScriptLoader, loader: Any, begun: float) -> Watch:
    """From now on the iterator tells when it is asked for a batch, and when it has one."""
    watch: Watch | None = vars(iterator).get(WATCH)
    if watch is None:
        vars(iterator)[WATCH] = watch = Watch(known, loader, begun)
        kind: Any = type(iterator)
        iterator.__class__ = watched(kind)
    latest = weakref.ref(watch)
    known.is_running = lambda: (one := latest()) is not None and one.is_running
    return watch


@functools.lru_cache(maxsize=64)
def watched(kind: Any) -> Any:
    """The subclass of a class of iterators; it has its name."""
    fetch = kind.__next__

    class Watched(kind):  # type: ignore[misc]
        def __next__(self) -> Any:
            return self.__dict__[WATCH].take(fetch, self)

        def _reset(self, *args: Any, **arguments: Any) -> None:
            watch = self.__dict__[WATCH]
            watch.begin()
            kind._reset(self, *args, **arguments)
            watch.workers = getattr(self, "_workers", ())
            watch.started()

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched
