"""Clocks in a worker: how long a batch is in the user's functions, the members of their transforms, known readers, collating.

    batch begins                                                        fetched        whole
    Photos.__getitem__ │ read │ __getitem__ │ decode │ Flip │ __getitem__ │   collate   │

Time belongs to the innermost of them. They are clocked where they are called from, by name, in workers only, whose objects are
copies: nothing of the training process is touched. Short samples are clocked in some batches only, and what is called so often
that clocks would cost a percent of a batch is let go.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune_loader.pipeline.look import is_users
from autotune_loader.pipeline.stage_places import Line, base, of_class, places, where

MOST_COST = 0.004
"""Of a batch's time, which clocks may take, and calls that go through them where none is read."""
CLOCKED_S, PASSED_S = 1e-5, 3e-7
"""What a reading and such a call take, in seconds: 2 us in a tight loop, and five times as much between reads of new data."""
REPORT_S = 0.1
"""What was seen travels with a batch, this often."""
FIRST_BATCH_S = 0.25
"""A worker's first batch opens files and imports; it counts only where it is so long that few others follow."""
Report = tuple[tuple[tuple[str, str, float, float], ...], tuple[float, ...]]
"""(stage, where, wall_s, cpu_s) of each stage; samples, wall_s, cpu_s, crowded_s, queue_cpu_s of batches that were clocked"""


class StageClock:
    """Clocks the thread that makes it, the main thread of a worker."""

    def __init__(self, dataset: Any) -> None:
        self._thread = threading.get_ident()
        self._schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._fetch, self._collate = base(dataset), ("", "")
        self._seen: dict[Line, list[float]] = {}
        self._stack: list[Line] = []
        self._wall = self._cpu = 0.0
        self._readings = self._skip = 0
        self._every = 1
        """Of so many batches one is clocked."""
        self._totals, self._all_s = [0.0, 0.0, 0.0], 0.0
        self._outside = (_crowded_s(self._schedule), 0.0)
        self._is_first, self._due = True, 0.0
        self._hooks: list[_Hook] = []

    @classmethod
    def begin(cls, dataset: Any) -> StageClock:
        """Clock what a dataset's samples are made by, from now on in this process."""
        clock, known = cls(dataset), set[tuple[int, Any]]()
        for owner, name, line in places(dataset):
            with contextlib.suppress(Exception):  # what does not let itself be changed is part of its caller
                if (id(owner), name) not in known:
                    known.add((id(owner), name))
                    clock._hooks.append(_Hook(clock, owner, name, line))
        return clock

    def fetch(self) -> None:
        """A batch begins."""
        self._stack = []
        if self._skip:
            self._skip -= 1
            return
        self._stack, self._readings = [self._fetch], 0
        self._wall, self._cpu = time.monotonic(), time.thread_time()

    def collate(self, collate_fn: Any) -> None:
        """Its samples are there, and this function joins them."""
        if self._stack:
            self._turn()
            if not self._collate[0]:
                self._collate = ("collate", where(collate_fn))
            self._stack = [self._collate]

    def batch(self, wall_s: float, cpu_s: float, samples: int) -> Report | None:
        """It is whole; returns what was seen since the last report, now and then."""
        is_clocked = bool(self._stack)
        if is_clocked:
            self._turn()
            self._stack = []
            for hook in self._hooks:
                hook.let_go_beyond(MOST_COST * wall_s / PASSED_S * self._every)
            self._skip = int(self._readings * CLOCKED_S / MOST_COST / max(wall_s, 1e-6))
            self._every = self._skip + 1
        if self._is_first:
            self._is_first = False
            if wall_s < FIRST_BATCH_S:
                self._seen, self._skip = {}, 0
                return None
        self._all_s += wall_s
        if is_clocked:
            self._totals = [a + b for a, b in zip(self._totals, (samples, wall_s, cpu_s), strict=True)]
        return self._report() if is_clocked and self._wall >= self._due else None

    def _report(self) -> Report:
        self._due = self._wall + REPORT_S
        before, self._outside = self._outside, (_crowded_s(self._schedule), _queue_cpu_s())
        # What is counted without a stop is taken for the batches that are clocked.
        share = self._totals[1] / self._all_s
        outside = [(after - earlier) * share for after, earlier in zip(self._outside, before, strict=True)]
        rows = tuple((*line, wall_s, cpu_s) for line, (wall_s, cpu_s) in self._seen.items())
        totals = (*self._totals, *outside)
        self._seen, self._totals, self._all_s = {}, [0.0, 0.0, 0.0], 0.0
        return rows, totals

    def end(self) -> None:
        """Put back what was there before."""
        for hook in self._hooks:
            hook.let_go_beyond(-1)

    def is_on(self) -> bool:
        """Whether this thread is making a batch that is clocked."""
        return bool(self._stack) and threading.get_ident() == self._thread

    def enter(self, line: Line) -> None:
        """A stage begins within another."""
        self._turn()
        self._stack.append(line)

    def leave(self) -> None:
        """It ends."""
        if len(self._stack) > 1:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        wall, cpu = time.monotonic(), time.thread_time()
        seconds = self._seen.setdefault(self._stack[-1], [0.0, 0.0])
        seconds[0] += wall - self._wall
        seconds[1] += cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        self._readings += 1


class _Hook:
    """A clock around a function, in the place in which it is looked up.

    Args:
        clock: of this worker.
        owner: a class, a module, a list, or the dict of an object's attributes.
        name: of it there.
        line: of the stage; without a place it is that of the user's line that calls. None is the class of the first argument.
    """

    def __init__(self, clock: StageClock, owner: Any, name: Any, line: Line | None) -> None:
        is_container = isinstance(owner, (dict, list))
        self._put: Callable[[Any, Any], None] = owner.__setitem__ if is_container else functools.partial(setattr, owner)
        self._name = name
        self._function = owner[name] if is_container else getattr(owner, name)
        self._calls = 0
        inner = self._function
        if inspect.isgeneratorfunction(inner) or set(getattr(inner, "__dict__", {})) - {"__wrapped__"}:
            raise TypeError("a generator works when it is asked for more, and what has attributes is asked for them")

        @functools.wraps(inner)
        def clocked(*arguments: Any, **named: Any) -> Any:
            self._calls += 1
            if not clock.is_on():
                return inner(*arguments, **named)
            stage = line or of_class(type(arguments[0]), inner)
            clock.enter(stage if stage[1] else (stage[0], _caller(sys._getframe(1), inner)))
            try:
                return inner(*arguments, **named)
            finally:
                clock.leave()

        self._put(name, clocked)

    def let_go_beyond(self, calls: float) -> None:
        """Put the function itself back where it is called more often in a batch: its time is then its caller's."""
        if self._calls > calls:
            self._put(self._name, self._function)
        self._calls = 0


def _caller(frame: types.FrameType | None, function: Any) -> str:
    """The user's line that called a library's function, and its name."""
    while frame is not None and not is_users(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return _line_text(frame and frame.f_code, frame.f_lineno if frame else 0, function)


@functools.lru_cache(maxsize=1024)
def _line_text(code: types.CodeType | None, number: int, function: Any) -> str:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return name if code is None else f"{Path(code.co_filename).name}:{number}, {name}"


def _crowded_s(schedule: Path) -> float:
    """Seconds in which a thread was ready and had no core, by its schedstat; 0 from a kernel that does not tell."""
    try:
        return int(schedule.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _queue_cpu_s() -> float:
    """CPU seconds of the thread that writes batches to the queue."""
    queue = next((each for each in threading.enumerate() if each.name == "QueueFeederThread"), None)
    ident = None if queue is None or not queue.is_alive() else queue.ident
    return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))
