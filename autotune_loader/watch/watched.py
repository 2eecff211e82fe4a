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
from pathlib import Path
from typing import Any

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.workload import length_of
from autotune_loader.watch.loader import ScriptLoader

WATCH = "_autotune_loader_watch"
"""Attribute of an iterator that is watched."""
CPU_EVERY_S = 0.5
"""So often the CPU time of torch's workers is read: 8 us each."""

log = logging.getLogger(__name__)


class Watch:
    """Whoever takes batches from one iterator, epoch after epoch.

    Args:
        known: the loader's record.
        loader: of the iterator; it is not kept.
        begun: when the iterator began to be made.
        clock: monotonic, in seconds.
        cpu_clock: CPU seconds of the calling thread.
    """

    workers: Sequence[Any] = ()
    """Processes of torch's that make the batches."""

    def __init__(
        self,
        known: ScriptLoader,
        loader: Any,
        begun: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._known, self._clock, self._cpu_clock, self._asked_cpu = known, clock, cpu_clock, 0.0
        size, is_stream = getattr(loader, "batch_size", None), getattr(loader, "_dataset_kind", 1) == 1
        self._size: int | None = size if isinstance(size, int) else None
        self._samples = 0 if self._size is None or is_stream else length_of(getattr(loader, "sampler", None)) or 0
        self._begin(begun)

    def _begin(self, now: float) -> None:
        self._loop, self._is_started, self._left = self._known.log.begin(now), False, self._samples
        self._reading: tuple[int, float] | None = None
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

    def ask(self) -> None:
        """The loop asks for a batch: its step has ended."""
        self._loop.ask(self._clock())
        if self._known.first_look is not None:
            self._known.look()
        self._asked_cpu = self._cpu_clock()

    def receive(self, batch: Any) -> None:
        """The loop has a batch."""
        now, cpu_s = self._clock(), self._cpu_clock() - self._asked_cpu
        try:
            if not self._loop.batches:
                self._known.measure(batch)
            self._loop.receive(now, self._samples_in(batch))
            self._known.log.totals.fetch_cpu_s += cpu_s
            if self.workers and now >= self._next_reading_s:
                self._next_reading_s = now + CPU_EVERY_S
                self._read_workers()
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a batch was not counted", exc_info=True)

    def end(self) -> None:
        """The loop is told that the epoch is over."""
        self._loop.end(self._clock())

    def _samples_in(self, batch: Any) -> int:
        if not self._left or self._size is None:  # torch does not count them out
            return samples_in(batch) or self._size or 1
        size = min(self._size, self._left)
        self._left -= size
        return size

    def _read_workers(self) -> None:
        """What CPU they took since the last reading; what they took before an epoch's first one was their start."""
        batches, cpu_s = self._loop.batches, sum(cpu_of(worker.pid) for worker in self.workers)
        if self._reading is not None:
            self._known.worker_batches += batches - self._reading[0]
            self._known.worker_cpu_s += cpu_s - self._reading[1]
        self._reading = batches, cpu_s


def cpu_of(pid: int) -> float:
    """CPU seconds of a process: utime and stime in `/proc/PID/stat`, its 14th and 15th field, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch_iterator(iterator: Any, known: ScriptLoader, loader: Any, begun: float) -> Watch:
    """From now on the iterator tells when it is asked for a batch, and when it has one."""
    watch: Watch | None = vars(iterator).get(WATCH)
    if watch is None:
        vars(iterator)[WATCH] = watch = Watch(known, loader, begun)
        iterator.__class__ = watched(type(iterator))
    latest = weakref.ref(watch)
    known.is_running = lambda: (one := latest()) is not None and one.is_running
    return watch


@functools.lru_cache(maxsize=64)
def watched(kind: type[Any]) -> type[Any]:
    """The subclass of a class of iterators; it has its name."""

    class Watched(kind):  # type: ignore[misc]
        def __next__(self) -> Any:
            watch = self.__dict__[WATCH]
            watch.ask()
            try:
                batch = kind.__next__(self)
            except StopIteration:
                watch.end()
                raise
            watch.receive(batch)
            return batch

        def _reset(self, *args: Any, **arguments: Any) -> None:
            watch = self.__dict__[WATCH]
            watch.begin()
            kind._reset(self, *args, **arguments)
            watch.workers = getattr(self, "_workers", ())
            watch.started()

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched
