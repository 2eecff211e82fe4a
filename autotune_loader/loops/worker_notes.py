"""What torch's own workers and its pinning thread note of each batch, in memory that they share with the loop.

    worker   get(task) ── fetch ── collate ── put(batch)          a row of the table, by the batch's number
    thread             get(batch) ── pins ── put(batch)           begin and end, by the same number

Torch's functions run as they are. Only the ends of their queues note when something passes: nothing is sent along with a batch,
and no frame is added to what the user's code raises, but for a trace, which tells collating apart.
"""

from __future__ import annotations

import functools
import inspect
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data._utils import pin_memory, worker

from autotune_loader.machine.clocks import garbage, queued_s
from autotune_loader.machine.kernel import memfd
from autotune_loader.pipeline.batches import initialized_accelerator
from autotune_loader.pipeline.loop_log import saving

if TYPE_CHECKING:
    from autotune_loader.pipeline.loop_log import Fetch, Pinned

ROW, ROWS = Struct("6d"), 1024
"""number, worker, fetch_start, fetch_end, collate_end, cpu_s; of so many batches that are under way."""
HEAD, WORKERS = Struct("6d"), 256
"""A `WorkerNote`; of so many workers."""
SIZE = ROW.size * ROWS + HEAD.size * WORKERS
WORKER_LOOPS = ("_worker_loop", "_process_worker_loop")
"""Torch's names of what runs in a worker (pytorch#161044)."""
SAVES = frozenset({"_save", "_legacy_save"})
"""What `torch.save` calls."""
QUICK_S, EACH = 0.002, 16
"""Of batches that take no longer most are only counted, by worker and loop, as noting one takes 10 us, and 50 amid other work:
each 16th is noted. In a trace all are."""
LOOK_EVERY_S = 0.02
"""So often a worker looks for how long it waited for a core, which takes 10 us, and whether it uses an accelerator."""


class WorkerNote(NamedTuple):
    """What a worker notes of itself."""

    born_s: float
    """From the start of its process until torch's loop, in which a spawned one imports and unpickles; 0 of one not seen."""
    ready_s: float
    """From then on until it asked for a batch, in which `worker_init_fn` runs."""
    uses_device: float
    """1 where it has initialized an accelerator."""
    batches: float
    """Those that it has made."""
    queued_s: float
    """In which it waited for a core meanwhile; 0 where the kernel does not tell."""
    garbage_s: float
    """Of garbage collections meanwhile."""


class Notes:
    """The table of one iterator. It is made before the workers start; `close` is called once they have."""

    _file = -1  # `close` is called, too, where it could not be made

    def __init__(self, *, forks: bool, collates: bool) -> None:
        self._file = -1 if forks else memfd("autotune-loader-notes")
        if self._file != -1:
            os.ftruncate(self._file, SIZE)
        self._memory, self._collates = mmap.mmap(self._file, SIZE), collates
        self._pinned: dict[int, tuple[int, Pinned]] = {}

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _attached, (reduction.DupFd(self._file), self._collates)

    def close(self) -> None:
        """No further worker starts."""
        if self._file != -1:
            os.close(self._file)
            self._file = -1

    def batch(self, number: int) -> tuple[Fetch | None, Pinned | tuple[()]]:
        """The history of a batch that has come, as far as it was noted."""
        noted, number_of_worker, *times = ROW.unpack_from(self._memory, ROW.size * (number % ROWS))
        of, times_of_pinning = self._pinned.get(number % ROWS, (-1, (0.0, 0.0)))
        pinned = times_of_pinning if of == number else ()
        if noted != number or not times[0]:
            return None, pinned
        return (int(number_of_worker), *times), pinned

    def of_worker(self, number: int) -> WorkerNote | None:
        """What a worker has noted of itself; None where nothing."""
        if number >= WORKERS:
            return None
        note = WorkerNote(*HEAD.unpack_from(self._memory, ROW.size * ROWS + HEAD.size * number))
        return note if note.born_s else None

    def watch_worker(self, arguments: dict[str, Any]) -> None:
        """In a worker: note what passes the queues of torch's loop."""
        number, tasks, results = (arguments[name] for name in ("worker_id", "index_queue", "data_queue"))
        get, put, memory = tasks.get, results.put, self._memory
        born_s, begun, head = _age_s(), time.monotonic(), ROW.size * ROWS + HEAD.size * number
        start = cpu_s = queued_before_s = garbage_before_s = next_look_s = queued_for_s = uses_device = 0.0
        ready_s: float | None = None
        batches, fetched, is_quick = 0, [0.0], False
        garbage.watch()
        if self._collates:
            arguments["collate_fn"] = functools.partial(_collate, arguments["collate_fn"], fetched)

        def noted_get(*args: Any, **options: Any) -> Any:
            nonlocal start, cpu_s, ready_s, queued_before_s, garbage_before_s
            if ready_s is None:
                ready_s = time.monotonic() - begun
                queued_before_s, garbage_before_s = queued_s("thread-self"), garbage.read()
            task = get(*args, **options)
            start, cpu_s = time.monotonic(), math.nan
            if not (is_quick and type(task) is tuple and task[0] % EACH):
                cpu_s = time.process_time()
            return task

        def note(of: int, end: float, took_s: float) -> None:
            nonlocal next_look_s, queued_for_s, uses_device
            row = of, number, start, fetched[0] if fetched[0] > start else end, end, took_s
            ROW.pack_into(memory, ROW.size * (of % ROWS), *row)
            if end >= next_look_s:
                next_look_s, queued_for_s = end + LOOK_EVERY_S, queued_s("thread-self") - queued_before_s
                uses_device = uses_device or float(initialized_accelerator() is not None)
            if number < WORKERS:
                garbage_s = garbage.read() - garbage_before_s
                HEAD.pack_into(memory, head, born_s, ready_s, uses_device, batches, queued_for_s, garbage_s)

        def noted_put(message: Any, *args: Any, **options: Any) -> None:
            nonlocal batches, is_quick
            end = time.monotonic()
            if type(of := message[0]) is int:
                batches += 1
                was_quick, is_quick = is_quick, end - start <= QUICK_S and not self._collates
                if not (was_quick and is_quick and of % EACH):
                    with suppress(Exception):  # whatever it is, it is no reason to end somebody's training
                        note(of, end, time.process_time() - cpu_s)
            put(message, *args, **options)

        tasks.get, results.put = noted_get, noted_put

    def watch_pinning(self, batches: Any, pinned: Any) -> tuple[Any, Any]:
        """Ends of the queues of torch's pinning thread that note what passes."""
        times, begun = self._pinned, 0.0

        def get(*args: Any, **options: Any) -> Any:
            nonlocal begun
            found = batches.get(*args, **options)
            begun = time.monotonic()
            return found

        def put(message: Any, *args: Any, **options: Any) -> None:
            if type(message[0]) is int:
                times[message[0] % ROWS] = message[0], (begun, time.monotonic())
            pinned.put(message, *args, **options)

        return _End(get=get), _End(put=put)


class _End:
    """One end of a queue, of which one method is used."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        vars(self).update(methods)


def _attached(file: Any, collates: bool) -> Notes:
    notes = Notes.__new__(Notes)
    descriptor = file.detach()
    notes._file, notes._collates, notes._memory = -1, collates, mmap.mmap(descriptor, SIZE)
    os.close(descriptor)
    return notes


def _collate(collate: Callable[[Any], Any], fetched: list[float], samples: Any) -> Any:
    fetched[0] = time.monotonic()
    return collate(samples)


def _age_s() -> float:
    """Seconds since this process was started; the 22nd field of `stat` (proc_pid_stat(5)) is in ticks since boot."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(1e-6, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 1e-6


class _Here(threading.local):
    """The notes of the iterator that this thread is making."""

    notes: Notes | None = None


here = _Here()


class NotedLoop:
    """Torch's worker loop, which notes what passes where this thread makes an iterator with notes."""

    def __init__(self, loop: Callable[..., None], notes: Notes | None = None) -> None:
        self._loop, self._notes = loop, notes
        functools.update_wrapper(self, loop)

    def __reduce__(self) -> Any:
        return _noted_loop, (here.notes,)

    def __call__(self, *args: Any, **options: Any) -> None:
        notes = self._notes if self._notes is not None else here.notes
        if notes is not None:
            with suppress(Exception):  # whatever it is, it is no reason to end somebody's training
                bound = inspect.signature(self._loop).bind(*args, **options)
                notes.watch_worker(bound.arguments)
                args, options = bound.args, bound.kwargs
        here.notes = None
        self._loop(*args, **options)


def _noted_loop(notes: Notes | None) -> NotedLoop:
    loop = getattr(worker, _name_of_loop())
    return NotedLoop(loop._loop if isinstance(loop, NotedLoop) else loop, notes)


def _name_of_loop() -> str:
    return next(name for name in WORKER_LOOPS if hasattr(worker, name))


def look_into_processes() -> None:
    """From now on garbage collections and checkpoints of this process are timed, and torch's workers may note their batches.

    Those do, and pinning threads, whose iterator has set `here.notes`.
    """
    garbage.watch()
    loop = getattr(worker, name := _name_of_loop())
    if isinstance(loop, NotedLoop):
        return
    pins, serialization = pin_memory._pin_memory_loop, vars(torch.serialization)

    @functools.wraps(pins)
    def pin(batches: Any, pinned: Any, *args: Any) -> None:
        notes = next(
            (notes for of, notes in tuple(pinning) if getattr(of(), "_worker_result_queue", None) is batches), None
        )
        pins(*((batches, pinned) if notes is None else notes.watch_pinning(batches, pinned)), *args)

    setattr(worker, name, NotedLoop(loop))
    vars(pin_memory)["_pin_memory_loop"] = pin
    for each in SAVES.intersection(
        serialization
    ):  # `torch.save` itself may have been pickled by its name, or imported, before
        serialization[each] = saving()(serialization[each])


pinning = deque[tuple[Callable[[], Any], Notes]](maxlen=8)
"""Iterators that may start a pinning thread, as weak references, and their notes."""
