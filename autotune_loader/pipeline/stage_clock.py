"""Clocks in a worker: how long a batch is in the user's functions, the members of their transforms, known readers, collating.

    batch begins                                                        fetched        whole
    Photos.__getitem__ │ read │ __getitem__ │ decode │ Flip │ __getitem__ │   collate   │

Time belongs to the innermost of them; while a worker waits for a core the clocks stand. They are clocked in workers only, whose
objects are copies, and for some batches only, so that they cost little.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autotune_loader.pipeline.workload import is_users, wrapped_datasets
from autotune_loader.values.trace import Seen, StageSamples

Stage = tuple[str, str]
"""stage, where"""
LONG_S = 1.5
"""A first batch that takes longer counts: a burst may see no second one, and opening and importing are little of it."""
MOST_COST = 0.004
"""Of all batches' time, which clocks may take: so seldom is one clocked."""
CLOCKED_S = 1.2e-5
"""What a reading takes, in seconds: 3 us in a tight loop, and four times as much between reads of new data."""
TOO_OFTEN = 0.05
"""Of a batch's time: a function whose clocks would take more of it is clocked no more, and its time is its caller's."""
MOST_READS, AWAY_S = 3, 1e-4
"""Of the two clocks, until they are read within so many seconds of each other."""
NAP_S, MOST_NAPS = 5e-4, 50
"""So long a worker that is to be clocked lets its last batch be written, and so often."""
READINGS_OF_BATCH = 10
"""A nap, which takes no CPU, and what was seen, which travels with its batch, cost as much as so many readings."""
MOST_DEPTH = 4
"""Containers of transforms within each other."""
ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__next__")
"""Methods by which a loader asks a dataset for samples."""
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
LIBRARY_STAGES = {
    "read": "PIL.Image:open numpy:load numpy:fromfile torch:load torchvision.io:read_file h5py:Dataset.__getitem__ "
    "pathlib:Path.read_bytes pathlib:Path.read_text",
    "decode": "PIL.ImageFile:ImageFile.load cv2:imread cv2:imdecode torchvision.io:decode_image torchaudio:load "
    "soundfile:read json:load json:loads zlib:decompress",
}
"""Functions by module and name, clocked where they are loaded."""


class StageClock:
    """Clocks the thread that makes it, the main thread of a worker, where it makes samples of this dataset.

    Its first batch opens files and imports: it does not count unless it takes long.
    """

    def __init__(self, dataset: Any) -> None:
        self._thread = threading.get_ident()
        self._fetch = _fetching(dataset)
        self._stack: list[Stage] = []
        self._seen: dict[Stage, list[float]] = {}
        self._wall = self._cpu = self._queue_cpu_s = self._queued_s = 0.0
        self._schedstat = -1
        with contextlib.suppress(OSError):  # the kernel does not tell
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._readings = self._skip = self._batches = 0
        self._is_settled = False
        self._hooks: list[_Hook] = []
        places = {(id(each[0]), each[1]): each for each in _places(dataset)}
        for owner, name, stage in places.values():
            with contextlib.suppress(Exception):  # what does not let itself be changed is part of its caller
                self._hooks.append(_Hook(self, owner, name, stage))

    def fetch(self) -> None:
        """A batch begins."""
        self._stack = []
        self._batches += 1
        if self._skip:
            self._skip -= 1
            return
        for hook in self._hooks:
            hook.calls = 0
            hook.exchange(hook.function, hook.clocked)
        _wait_for_feeder()
        self._stack, self._seen, self._readings = [self._fetch], {}, READINGS_OF_BATCH
        self._wall, self._cpu = self._wall_s(), time.thread_time()

    def collate(self, collate_fn: Any) -> None:
        """Its samples are there, and this function joins them."""
        if self._stack:
            self._turn()
            self._stack = [("collate", _where(collate_fn))]

    def batch(self, cpu_s: float, samples: int) -> StageSamples | None:
        """It is whole; returns what was seen of it where it was clocked."""
        if not self._stack:
            return None
        self._turn()
        self._stack = []
        for hook in self._hooks:
            hook.exchange(hook.clocked, hook.function)
        wall_s = sum(seconds[0] for seconds in self._seen.values())
        kept = [hook for hook in self._hooks if hook.calls * CLOCKED_S <= TOO_OFTEN * wall_s]
        counts = (self._is_settled or wall_s > LONG_S) and len(kept) == len(self._hooks)
        self._is_settled = True
        self._hooks = kept
        # Batches are written while others are made: what was written since the last clocked one is shared out.
        before, self._queue_cpu_s = self._queue_cpu_s, _queue_cpu_s()
        batches, self._batches = self._batches, 0
        if not counts:
            return None
        self._skip = int(self._readings * CLOCKED_S / MOST_COST / max(wall_s, 1e-6))
        seen = tuple(Seen(*stage, *seconds) for stage, seconds in self._seen.items())
        queue_cpu_s = (self._queue_cpu_s - before) / batches
        return StageSamples(seen=seen, samples=samples, cpu_s=cpu_s, queue_cpu_s=queue_cpu_s)

    def call(self, hook: _Hook, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the function that is hooked: a stage within another, where this thread makes a batch that is clocked."""
        if not self._stack or threading.get_ident() != self._thread:
            return hook.function(*arguments, **named)
        hook.calls += 1
        self._turn()
        self._stack.append(hook.stage or hook.stage_of(type(arguments[0])))
        try:
            return hook.function(*arguments, **named)
        finally:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        wall, cpu = self._wall_s(), time.thread_time()
        seconds = self._seen.setdefault(self._stack[-1], [0.0, 0.0])
        seconds[0] += wall - self._wall
        seconds[1] += cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        self._readings += 1

    def _wall_s(self) -> float:
        """Now, on a clock that stands while the thread is ready to run and waits for a core (`schedstat`: `run queued slices`).

        A thread often leaves its core in a system call: both are read once more where it did between the two.
        """
        for _ in range(MOST_READS):
            begun = time.monotonic()
            with contextlib.suppress(OSError, IndexError, ValueError):  # the kernel does not tell
                self._queued_s = int(os.pread(self._schedstat, 64, 0).split(None, 2)[1]) / 1e9
            now = time.monotonic()
            if now - begun < AWAY_S:
                break
        return now - self._queued_s


class _Hook:
    """A clock around a function, where it is looked up: in a class, a module, a list, or the dict of an object's attributes."""

    def __init__(self, clock: StageClock, owner: Any, name: Any, stage: Stage | None) -> None:
        get, put = (operator.getitem, operator.setitem) if isinstance(owner, (dict, list)) else (getattr, setattr)
        self._get, self._set = functools.partial(get, owner, name), functools.partial(put, owner, name)
        self.function = inner = self._get()
        self.stage, self.calls = stage, 0
        if inspect.isgeneratorfunction(inner) or set(getattr(inner, "__dict__", {})) - {"__wrapped__"}:
            raise TypeError("a generator works when it is asked for more, and what has attributes is asked for them")
        self.clocked = functools.wraps(inner)(lambda *arguments, **named: clock.call(self, arguments, named))

    def stage_of(self, kind: type) -> Stage:
        return kind.__name__, _where(self.function if is_users(kind.__module__) else kind)

    def exchange(self, one: Any, other: Any) -> None:
        """Put the other in the place of the one, where the user's code has put nothing else there."""
        with contextlib.suppress(Exception):
            if self._get() is one:
                self._set(other)


def _places(dataset: Any) -> Iterator[tuple[Any, Any, Stage | None]]:
    """What is clocked: owner, name there, and stage; None for a stage is the class of the first argument."""
    for each in wrapped_datasets(dataset):
        kinds = [kind for kind in type(each).__mro__ if is_users(kind.__module__)]
        entries = [vars(kind)[name] for kind in kinds for name in ENTRIES if inspect.isfunction(vars(kind).get(name))]
        names = set[str]().union(*(_names_of(entry.__code__) for entry in entries)) - {*ENTRIES}
        spaces: list[Any] = [*kinds, *(entry.__globals__ for entry in entries)]
        for owner in spaces:
            held = owner if isinstance(owner, dict) else vars(owner)
            functions = [(name, held[name]) for name in names if inspect.isfunction(held.get(name))]
            yield from ((owner, name, (name, _where(own))) for name, own in functions if is_users(own.__module__))
        for name, value in list(getattr(each, "__dict__", {}).items()):
            yield from _of_value(vars(each), name, value, MOST_DEPTH)
    for stage, paths in LIBRARY_STAGES.items():
        for module, path in (each.split(":") for each in paths.split()):
            *outer, last = path.split(".")
            holder = functools.reduce(lambda found, name: getattr(found, name, None), outer, sys.modules.get(module))
            if hasattr(holder, last):
                yield holder, last, (stage, f"{module}.{path}")


def _of_value(owner: Any, name: Any, value: Any, depth: int) -> Iterator[tuple[Any, Any, Stage | None]]:
    """A function, an object that is called, or the members of a container of them."""
    called = _plain(value)
    held = called if isinstance(called, (list, tuple, torch.nn.Sequential)) else getattr(called, "transforms", None)
    if isinstance(held, (list, tuple, torch.nn.Sequential, torch.nn.ModuleList)):
        if depth and all(map(callable, held)):
            for index, member in enumerate(held):
                yield from _of_value(held, index, member, depth - 1)
    elif isinstance(value, FUNCTIONS) and hasattr(called, "__name__"):
        yield owner, name, (called.__name__.strip("<>"), _where(called))
    elif not isinstance(called, type):
        entry = "forward" if isinstance(called, torch.nn.Module) else "__call__"
        kind = next((kind for kind in type(called).__mro__ if inspect.isfunction(vars(kind).get(entry))), None)
        if kind is not None:
            yield kind, entry, None


def _names_of(code: types.CodeType) -> set[str]:
    """The names that a function's code reads, inner functions included."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names_of, inner))


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _where(function: Any) -> str:
    """The line of a function of the user's, or the name of a library's."""
    function = inspect.unwrap(_plain(function))
    code = getattr(function, "__code__", None)
    if code is None or not is_users(function.__module__):
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}".strip(".")
    return f"{'cell' if 'ipykernel' in code.co_filename else Path(code.co_filename).name}:{code.co_firstlineno}"


def _fetching(dataset: Any) -> Stage:
    """The stage of what is in no other: the method by which the user's own class is asked for samples."""
    for each in wrapped_datasets(dataset):
        for kind in type(each).__mro__:
            entry = next((name for name in ENTRIES if name in vars(kind)), None)
            if entry is not None and is_users(kind.__module__):
                return f"{type(each).__name__}.{entry}", _where(vars(kind)[entry])
    return type(dataset).__name__, _where(type(dataset))


def _feeder() -> threading.Thread | None:
    """The thread that writes batches to the queue."""
    return next((each for each in threading.enumerate() if each.name == "QueueFeederThread"), None)


def _queue_cpu_s() -> float:
    """Its CPU seconds."""
    ident = getattr(_feeder(), "ident", None)
    return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))


def _wait_for_feeder() -> None:
    """Return when it has nothing to do: where it waits for a core with the interpreter lock, a stage waits for the lock."""
    feeder = _feeder()
    if feeder is None:
        return
    for _ in range(MOST_NAPS):
        time.sleep(NAP_S)
        with contextlib.suppress(KeyError, OSError):
            state = Path(f"/proc/self/task/{feeder.native_id}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "S" and sys._current_frames()[feeder.ident or 0].f_code.co_name == "wait":  # of its condition
                return
