"""An iterator of torch's, or one of ours in its place, that tells how long its loop waits: of a subclass with a `__next__`.

next(iterator) ── ask ── the iterator's own __next__ ── receive      StopIteration ── end

No code of the user's runs for it: samples are counted by the lists of indices that torch draws for a batch, and of a batch
only tensors within Python's own containers are looked at.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from autotune_loader.machine.processes import PROC, process_use, queued_s
from autotune_loader.watch.script_loader import CpuTimes, ScriptLoader

WATCH = "_autotune_loader_watch"
"""Attribute of an iterator that is watched."""
LOOK_EVERY_S = 0.02
"""So often a batch is looked at more closely: with its CPU times, which take 10 us."""
OWN_SCHEDSTAT = "/proc/thread-self/schedstat"
"""See `queued_s`, which takes three times as long for the sake of its paths."""
READ_EVERY_S = 0.5
"""So often the CPU times of this process and of torch's workers are read: 20 us a process, and a thread of a worker."""
CONTAINERS: tuple[Any, ...] = (dict, list, tuple)
WAITS_FOR_A_THREAD = {("threading.py", "join"), ("_base.py", "result"), ("base_events.py", "run_forever")}
"""Where the main thread is while another one trains; beside one that reads ahead, it trains."""
ITERABLE = 1
"""`_DatasetKind` of torch for streams."""

log = logging.getLogger(__name__)


def thread_times() -> CpuTimes:
    """Of the calling thread."""
    try:
        descriptor = os.open(OWN_SCHEDSTAT, os.O_RDONLY)
        try:
            queued = int(os.read(descriptor, 64).split()[1]) / 1e9
        finally:
            os.close(descriptor)
    except (OSError, IndexError):  # the kernel does not tell
        queued = 0.0
    return CpuTimes(time.thread_time(), queued)


def process_times(pid: int) -> CpuTimes:
    """Of a process, with all of its threads."""
    use = process_use(PROC / str(pid))
    try:
        threads = os.listdir(PROC / str(pid) / "task")  # noqa: PTH208 - names are wanted
    except OSError:  # it is gone
        threads = []
    return CpuTimes(0.0 if use is None else use.cpu_s, sum(queued_s(f"{pid}/task/{thread}") for thread in threads))


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
        known.clock = clock
        size = getattr(loader, "batch_size", None)
        self._size = size if isinstance(size, int) else 0
        self.is_stream = getattr(loader, "_dataset_kind", 0) == ITERABLE
        self.sizes = deque[int]()
        """Samples of the batches whose indices were drawn."""
        self._begin(begun)

    def _begin(self, now: float) -> None:
        self._loop, self._is_started, self._samples = self._known.log.begin(now), False, 0
        self._thread = threading.get_ident()
        self._is_beside = self._thread != threading.main_thread().ident
        self.sizes.clear()
        self._asked_cpu: CpuTimes | None = None
        self._reading: tuple[float, int, dict[int, CpuTimes]] | None = None
        self._next_reading_s = now
        self._known.waiting_since = now

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
        known, loop, asked = self._known, self._loop, self._clock()
        loop.ask(asked)
        known.waiting_since = asked
        if self._is_beside or threading.get_ident() != self._thread:
            self._read_by_thread()
        if asked >= known.next_look_s:
            self._look(asked)
        sizes = self.sizes
        try:
            batch = fetch(iterator)
        except StopIteration:
            known.waiting_since = None
            if not loop.is_over:
                loop.end(self._clock())
                known.epoch_samples.add(self._samples)
            raise
        except BaseException:
            known.waiting_since = None
            if sizes:
                sizes.popleft()
            raise
        received = self._clock()
        known.waiting_since = None
        size = sizes.popleft() if sizes else self._size_of(iterator, batch)
        self._samples += size
        loop.receive(received, size)
        if self._asked_cpu is not None:
            self._clocked(received, batch, self._asked_cpu)
        return batch

    def delivered(self, iterator: Any, message: Any) -> None:
        """A worker of a stream has sent something; the end of its shard is no batch."""
        number, data = message
        if type(number) is int and type(data).__name__ != "_IterableDatasetStopIteration":
            self._known.delivered[iterator._task_info[number][0]] += 1

    def _size_of(self, iterator: Any, batch: Any) -> int:
        """Samples of a batch for which torch drew no list of indices; an iterator of ours may have drawn one itself."""
        if self._size and not self.is_stream:
            drawn = getattr(iterator, "indices", None)
            return len(drawn) if type(drawn) is list else self._size
        found = length_at_first(batch)
        return min(found, self._size) if found and self._size else found or self._size or 1

    def _read_by_thread(self) -> None:
        """A batch is asked for by a thread: it reads ahead, unless the main thread waits for its end, so that it trains."""
        known, thread = self._known, threading.get_ident()
        if thread == self._thread and is_main_thread_waiting():
            self._is_beside = False
            return
        known.ahead += 1
        if known.reader is None:
            known.reader = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))

    def _look(self, now: float) -> None:
        """Now and then: whether something can be said of the loader, and what CPU its batches take."""
        self._known.next_look_s = now + LOOK_EVERY_S
        if self._known.first_look is not None:
            self._known.first_look(self._known)
        self._asked_cpu = self._cpu_clock()

    def _clocked(self, now: float, batch: Any, asked: CpuTimes) -> None:
        """A batch whose CPU time was clocked."""
        self._known.in_loop.add(1, asked, self._cpu_clock())
        self._asked_cpu = None
        try:
            if self._known.batch_bytes is None:
                self._known.batch_bytes = sum(tensor.nbytes for tensor in tensors_in(batch))
            if now >= self._next_reading_s:
                self._next_reading_s = now + READ_EVERY_S
                self._read(now)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a batch was not looked at", exc_info=True)

    def _read(self, now: float) -> None:
        """What CPU this process and torch's workers took since the last reading; before an epoch's first one they started."""
        workers = [worker.pid for worker in self.workers if worker.pid is not None]
        times = {pid: process_times(pid) for pid in (os.getpid(), *workers)}
        if self._reading is not None:
            then, batches, earlier = self._reading
            both = earlier.keys() & times.keys()  # the number of workers may have changed
            self._known.read_s += now - then
            self._known.busy_s += sum(times[pid].cpu_s - earlier[pid].cpu_s for pid in both)
            for pid in both & set(workers):
                self._known.in_workers.add((self._loop.batches - batches) / len(workers), earlier[pid], times[pid])
        self._reading = now, self._loop.batches, times


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The dense tensors in Python's own containers, in classes derived from these, and among the attributes of an object."""
    kind = type(batch)
    if kind is torch.Tensor:
        if batch.layout is torch.strided and not batch.is_nested:
            yield batch
        return
    for each in items_of(batch):
        if type(each) is torch.Tensor or kind in CONTAINERS:
            yield from tensors_in(each)


def items_of(batch: Any) -> Iterable[Any]:
    """What a container or an object holds; no method of a class of the user's is called."""
    for kind in CONTAINERS:
        if issubclass(type(batch), kind):
            return dict.values(batch) if kind is dict else kind.__iter__(batch)
    try:
        attributes: dict[str, Any] = object.__getattribute__(batch, "__dict__")
    except AttributeError:
        return ()
    return attributes.values()


def length_at_first(batch: Any) -> int:
    """Samples of a batch by the first that it holds: a tensor's first dimension, or a list's length; 0 where there is none."""
    length = 0
    while type(batch) is not torch.Tensor:
        kind = type(batch)
        if kind not in CONTAINERS or not batch:
            return length
        length = len(batch) if kind is list else 0
        batch = next(iter(batch.values() if kind is dict else batch))
    return batch.shape[0] if batch.layout is torch.strided and not batch.is_nested and batch.dim() else length


def is_main_thread_waiting() -> bool:
    """Whether the main thread waits for the end of another one, as where training runs in a thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in WAITS_FOR_A_THREAD:  # noqa: PTH119
            return True
        frame = frame.f_back
    return False


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

        def _next_index(self) -> Any:
            indices = kind._next_index(self)
            watch = self.__dict__[WATCH]
            if type(indices) is list and not watch.is_stream:
                watch.sizes.append(len(indices))
            return indices

        def _try_get_data(self, *args: Any, **arguments: Any) -> Any:
            found = kind._try_get_data(self, *args, **arguments)
            watch = self.__dict__[WATCH]
            if watch.is_stream and found[0]:
                with contextlib.suppress(Exception):  # torch's own affair
                    watch.delivered(self, found[1])
            return found

        def _reset(self, *args: Any, **arguments: Any) -> None:
            watch = self.__dict__[WATCH]
            watch.begin()
            kind._reset(self, *args, **arguments)
            watch.workers = getattr(self, "_workers", ())
            watch.started()

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched
