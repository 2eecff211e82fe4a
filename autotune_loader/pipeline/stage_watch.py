"""Watches what a worker is at, at a cost below one percent of its time.

    computing   a timer of CPU time (SIGPROF): its handler runs in the main thread, between two instructions of Python
    waiting     a thread that looks at the main thread's frames now and then, and whether it is ready to run

Neither would do alone. A thread that looks has to wait for the interpreter lock, and gets it when the main thread next
lets go of it: what held the lock is seen as what follows it, which was wrong by up to 56 points (studies/stages.py). So it
counts only where it came in time, which is where the lock was free: then the frame waits, or computes without the lock.
A timer of wall seconds would interrupt what waits, and file systems in user space answer that with errors; one of CPU
seconds does not fire while a worker waits. A C function that holds the lock delays the handler to its end, where the
frame is still its caller's; the CPU seconds since the last sample tell how many samples it swallowed.

A timer of the main thread alone (`timer_create`), at regular or random times, never fires while that waits, but gave stages
after a wait half of their samples: 17 points off. Why is not proven; the kernel looks at timers of CPU time at its ticks.

Other profilers look from another process (py-spy, austin), which containers forbid, or at every call (pyinstrument,
cProfile), which costs the more the more calls a transform makes. Only workers are watched: they end with the burst, and
what was the user's is still as it was.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any

from autotune_loader.pipeline.stage_names import UNKNOWN, Line, line_of

CPU_PERIOD_S = 0.015
"""CPU seconds between two samples: a handler takes about 20 us."""
LOOK_PERIOD_S = 0.03
"""Seconds between two looks, on average: one costs the main thread at most two changes of the lock."""
IN_TIME_S = 0.00015
"""A look that comes later than this, its wait for a core apart, had to wait for the interpreter lock."""
REPORT_S = 0.1
"""What was seen travels with a batch, this often."""
FIRST_BATCH_S = 0.25
"""A worker's first batch opens files and imports; it counts only where it is so long that few others follow."""

Report = tuple[tuple[tuple[str, str, float, float, float], ...], tuple[float, ...]]
"""(stage, where, computing, waiting, released) of each line; samples, wall_s, cpu_s, thread_cpu_s, crowded_s, queue_cpu_s,
looks: all since the last report"""


class StageWatch:
    """Watches the thread that makes it, which must be the main thread of a worker."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        folder = f"/proc/self/task/{threading.get_native_id()}"
        self._schedule = Path(f"{folder}/schedstat")
        self._status = os.open(f"{folder}/stat", os.O_RDONLY)
        self._seen: dict[Line, list[float]] = {}
        self._looks = 0
        self._last_cpu_s = 0.0
        self._batches = [0.0, 0.0, 0.0]
        self._is_first = True
        self._clocks = (0.0, 0.0, 0.0)
        self._due = 0.0

    @classmethod
    def begin(cls) -> StageWatch | None:
        """Watch the calling thread from now on; None where that is impossible, or the user samples CPU time, too."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not hasattr(signal, "SIGPROF") or not hasattr(time, "pthread_getcpuclockid"):
            return None
        if signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL or any(signal.getitimer(signal.ITIMER_PROF)):
            return None
        try:
            watch = cls()
        except OSError:  # no /proc
            return None
        watch._last_cpu_s = time.thread_time()
        watch._clocks = watch._read_clocks()
        signal.signal(signal.SIGPROF, watch._on_timer)
        signal.siginterrupt(signal.SIGPROF, False)  # system calls of C libraries go on
        # An interpreter that ends gives the signal back its default, which is to end the process.
        util.Finalize(watch, signal.setitimer, args=(signal.ITIMER_PROF, 0.0), exitpriority=100)
        signal.setitimer(signal.ITIMER_PROF, CPU_PERIOD_S, CPU_PERIOD_S)
        threading.Thread(target=watch._look_around, name="autotune-stages", daemon=True).start()
        return watch

    def batch(self, now: float, wall_s: float, cpu_s: float, samples: int) -> Report | None:
        """Count a batch that is whole; returns what was seen since the last report, now and then."""
        if self._is_first:
            self._is_first = False
            if wall_s < FIRST_BATCH_S:
                self._forget()
                return None
        batches = self._batches
        batches[0] += samples
        batches[1] += wall_s
        batches[2] += cpu_s
        return None if now < self._due else self._report(now)

    def _report(self, now: float) -> Report:
        self._due = now + REPORT_S
        before, self._clocks = self._clocks, self._read_clocks()
        since = (after - earlier for after, earlier in zip(self._clocks, before, strict=True))
        seen, looks, batches = self._seen, self._looks, self._batches
        self._seen, self._looks, self._batches = {}, 0, [0.0, 0.0, 0.0]
        # The handler or the other thread may still be about to add to it: the copy is made in one go.
        rows = tuple((*line, *counts) for line, counts in list(seen.items()))
        return rows, (*batches, *since, looks)  # type: ignore[return-value]

    def _forget(self) -> None:
        self._seen, self._looks, self._clocks = {}, 0, self._read_clocks()

    def _read_clocks(self) -> tuple[float, float, float]:
        """CPU seconds of the thread, seconds in which it was ready and had no core, CPU seconds of the queue's thread."""
        crowded_s = _crowded_s(self._schedule)
        queue = next((each for each in threading.enumerate() if each.name == "QueueFeederThread"), None)
        ident = None if queue is None or not queue.is_alive() else queue.ident
        queue_s = 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))
        return time.clock_gettime(self._clock), crowded_s, queue_s

    def _on_timer(self, _number: int, frame: FrameType | None) -> None:
        cpu_s = time.thread_time()
        since, self._last_cpu_s = cpu_s - self._last_cpu_s, cpu_s
        if since < CPU_PERIOD_S / 4:  # another thread's CPU time made it fire
            self._last_cpu_s -= since
            return
        swallowed = int(since / CPU_PERIOD_S)
        line = _line_of(frame, after=True)
        if line is not None:
            self._count(line, 0, float(max(1, swallowed)))

    def _count(self, line: Line, column: int, weight: float) -> None:
        self._seen.setdefault(line, [0.0, 0.0, 0.0])[column] += weight

    def _look_around(self) -> None:
        schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        due = time.monotonic()
        while True:
            # Intervals without memory: a look that waited for the lock comes when the lock is let go, and with others the
            # next would never fall into what follows it (a wait, say; `studies.stages accuracy`).
            due = max(due, time.monotonic()) + random.expovariate(1 / LOOK_PERIOD_S)
            crowded_s = _crowded_s(schedule)
            time.sleep(max(0.0, due - time.monotonic()))
            late_s = time.monotonic() - due
            if late_s <= IN_TIME_S or late_s - (_crowded_s(schedule) - crowded_s) <= IN_TIME_S:
                self._look()

    def _look(self) -> None:
        # As long as this holds the lock, the main thread either waits or computes without it.
        status = os.pread(self._status, 512, 0)
        line = _line_of(_frame_of(self._thread))
        if line is not None:
            self._looks += 1
            self._count(line, 2 if _is_runnable(status) else 1, 1.0)


def _crowded_s(schedule: Path) -> float:
    """Seconds in which a thread was ready and had no core, by its schedstat; 0 from a kernel that does not tell."""
    try:
        return int(schedule.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _is_runnable(status: bytes) -> bool:
    """Whether a thread has a core or is ready for one, by its line in /proc: "4711 (name) R ..."."""
    return status[status.rfind(b")") + 2 :][:1] == b"R"


def _line_of(frame: FrameType | None, after: bool = False) -> Line | None:
    try:
        return line_of(frame, after)
    except Exception:  # a user's object whose attributes raise must not end a batch
        return UNKNOWN


def _frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread; a garbage collection meanwhile may hang before Python 3.12 (gh-106883)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        frames: dict[int, Any] = sys._current_frames()
        return frames.get(thread)
    finally:
        if collects:
            gc.enable()
