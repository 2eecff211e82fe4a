"""What is seen of a loader's loops and of torch's workers, beside the log of its batches."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from autotune_loader.loops.worker_notes import EACH, QUICK_S, Notes, WorkerNote, here, look_into_processes, pinning
from autotune_loader.machine.clocks import garbage
from autotune_loader.machine.nvml import GpuMeter
from autotune_loader.machine.processes import PROC, CpuTimes, copied_bytes, private_bytes, process_use
from autotune_loader.pipeline.loop_log import Fetch, Log, Pinned
from autotune_loader.values import MAIN_PROCESS, LoaderConfig, LoaderTrace, Sampled

READ_EVERY_S, READ_FIRST_S, MOST_READ = 2.0, 0.5, 4
"""So often this process and so many of a loader's workers at most are read: CPU times take 20 us for each process and thread.
The second time is sooner, so that short loops have figures, too. NVML is asked at the same time."""
MEMORY_S, MEMORY_SHARE, MEMORY_S_PER_BYTE = 0.05, 0.005, 0.08 / 2**30
"""Reading how much of a worker's memory is its own takes so long, and at most these seconds and this share of the training's
time."""
IDLE_S = 2.0
"""Workers that nobody has asked for a batch for so long are idle."""
GPU_EVERY_S = 2.0
"""So often NVML is asked how busy the GPU was since the last time, once the script uses CUDA."""


class CpuOfBatches:
    """CPU times of those batches that were clocked."""

    def __init__(self) -> None:
        self.batches = self.cpu_s = self.queued_s = 0.0

    def add(self, batches: float, before: CpuTimes, after: CpuTimes) -> None:
        self.batches += batches
        self.cpu_s += after.cpu_s - before.cpu_s
        self.queued_s += after.queued_s - before.queued_s

    @property
    def of_one(self) -> CpuTimes | None:
        """The mean; None where none was clocked."""
        return CpuTimes(self.cpu_s / self.batches, self.queued_s / self.batches) if self.batches else None


@dataclass(slots=True)
class OfWorkers:
    """What is known of a loader's workers, over all of its epochs; seconds are sums over workers."""

    started: int = 0
    """Those that have made a batch."""
    on_device: int = 0
    """Those of them that have initialized an accelerator."""
    batches: float = 0.0
    """Those that they have noted."""
    queued_s: float = 0.0
    """In which they waited for a core."""
    garbage_s: float = 0.0
    """In which they collected garbage."""
    ready_s: float = 0.0
    """Until they were ready: imports, unpickling and `worker_init_fn`."""
    copied_bytes: int = 0
    """Memory of one of them that it shared with this process first, and has copied."""
    idle_s: float = 0.0
    """In which they lived and nobody asked for batches."""
    idle_bytes: int = 0
    """Their own memory then, of all of them."""
    memory_s: float = 0.0
    """Spent on reading their memory."""


class LoopFigures:
    """Of one loader.

    Attributes:
        own: its settings, as the script has them.
        log: of its batches.
        in_loop: CPU times of making batches, or of receiving them, in the loop's own thread.
        in_workers: of making them in torch's workers.
        of_workers: what is known of torch's workers.
        read_s, busy_s: seconds in which CPU times were read; of CPU that this process and torch's workers took meanwhile.
        next_read_s: when they are read again.
        gpu_s, gpu_busy_s: seconds of which NVML has told how busy the GPU was, and in which it was.
        gpu_since: from when on it is asked for the next time.
        batch_bytes, batch_tensors: of its first batch.
        counters: what was read now and then, by its name, where a trace is written.
    """

    def __init__(self, own: LoaderConfig) -> None:
        self.own, self.log = own, Log()
        self.log.garbage_s = garbage.read
        self.in_loop, self.in_workers, self.of_workers = CpuOfBatches(), CpuOfBatches(), OfWorkers()
        self.read_s = self.busy_s = self.next_read_s = self.gpu_s = self.gpu_busy_s = 0.0
        self.batch_bytes: int | None = None
        self.batch_tensors = 0
        self.gpu_since = 0.0
        self.counters: dict[str, list[tuple[float, float]]] = {}

    @property
    def has_workers(self) -> bool:
        """Whether the script has asked for worker processes."""
        return self.own.num_workers > 0

    def begin_trace(self, most: int) -> None:
        """From now on batches are kept for a trace, at most so many."""
        self.log.sampled = Sampled(most)

    def trace(self, name: str) -> LoaderTrace | None:
        """What a trace shows of it; None where none is written."""
        sampled = self.log.sampled
        return None if sampled is None else LoaderTrace(name, sampled.rows, tuple(self.log.intervals), self.counters)

    def count(self, name: str, now: float, value: float) -> None:
        """Something was read, for a trace."""
        if self.log.sampled is not None:
            self.counters.setdefault(name, []).append((now, value))

    @property
    def nvtx(self) -> Any:
        """Torch's module of NVTX, where the script uses CUDA."""
        return torch.cuda.nvtx if torch.cuda.is_initialized() else None

    @staticmethod
    def clock() -> CpuTimes:
        """CPU times of this thread, before a batch is asked for."""
        return CpuTimes.of_thread()

    def clocked(self, asked: CpuTimes) -> None:
        """The batch is there."""
        self.in_loop.add(1, asked, CpuTimes.of_thread())

    @staticmethod
    def close() -> None:
        """Collections are timed no more; what stands in torch's places only calls torch's own."""
        garbage.stop()

    def look_into(self, batch: Any) -> None:
        """See what the first batch is made of."""
        if self.batch_bytes is None:
            sizes = [tensor.nbytes for tensor in tensors_in(batch)]
            self.batch_bytes, self.batch_tensors = sum(sizes), len(sizes)

    def read_gpu(self, now: float) -> None:
        """How busy the GPU was since the last time; where NVML keeps no samples, of late."""
        if now < self.gpu_since + GPU_EVERY_S or not torch.cuda.is_initialized():
            return
        begun, self.gpu_since = self.gpu_since, now
        share = gpu_meter().end(begun, now).utilization
        if share is None:
            share = gpu_meter().now().utilization
        if share is not None:
            self.gpu_s += now - begun
            self.gpu_busy_s += share * (now - begun)
            self.count("GPU busy, %", now, 100 * share)


class Workers:
    """Those of one iterator, of which the script has `asked` for so many."""

    quick_s = QUICK_S
    """A batch that is waited for no longer is quick."""

    def __init__(self, figures: LoopFigures, iterator: Any, count: int) -> None:
        self._figures, self._found, self._log, self.asked = figures, figures.of_workers, figures.log, count
        self._processes: Sequence[Any] = ()
        self._notes: Notes | None = None
        self._seen: dict[int, WorkerNote] = {}
        self._reading: tuple[float, int, dict[int, CpuTimes]] | None = None
        self._is_idle_known = False
        self._idle_since = 0.0
        look_into_processes()
        with suppress(Exception):  # a kernel without files in memory: what they note is not known
            if count:
                self._notes = Notes(forks=self._log.parent is not None, collates=self._log.sampled is not None)
                if getattr(iterator, "_pin_memory", False):
                    pinning.append((weakref.ref(iterator), self._notes))
        here.notes = self._notes

    def started(self, iterator: Any) -> None:
        """They have been started."""
        self._processes, here.notes = getattr(iterator, "_workers", ()), None
        if self._notes is not None:
            self._notes.close()

    def may_count(self, iterator: Any) -> bool:
        """Whether the next batch, where batches are quick, may only be counted: workers note each 16th."""
        return not self.asked or getattr(iterator, "_rcvd_idx", 0) % EACH != 0

    def history(self, number: int, asked: float, received: float) -> tuple[Fetch | None, Pinned | tuple[()]]:
        """That of a batch that has come, as far as it was noted; without workers, the loop has made it itself."""
        if not self.asked:
            return (MAIN_PROCESS, asked, received, received, math.nan), ()
        return (None, ()) if self._notes is None else self._notes.batch(number)

    def gather(self) -> None:
        """Sum up what they have noted since the last time."""
        found, notes = self._found, self._notes
        for number in range(self.asked):
            note = None if notes is None else notes.of_worker(number)
            if note is None:
                continue
            before = self._seen.get(number)
            if before is None:
                found.started += 1
                before = WorkerNote(*[0.0] * len(note))
            self._seen[number] = note
            found.on_device += int(note.uses_device - before.uses_device)
            found.batches += note.batches - before.batches
            found.queued_s += note.queued_s - before.queued_s
            found.garbage_s += note.garbage_s - before.garbage_s
            found.ready_s += note.born_s + note.ready_s - before.born_s - before.ready_s

    def begin(self, now: float) -> None:
        """An epoch begins: they may be others."""
        self._reading, self._figures.gpu_since = None, now

    def look(self, now: float, batches: int) -> None:
        """Now and then, after so many batches of an epoch: read what they and this process do."""
        figures = self._figures
        figures.next_read_s = now + (READ_FIRST_S if self._reading is None else READ_EVERY_S)
        figures.read_gpu(now)
        self._read(now, batches)
        self.gather()
        self._look_at_memory()

    def _pids(self) -> list[int]:
        """Of those that are read."""
        return [each.pid for each in self._processes[:MOST_READ] if each.pid is not None]

    def _read(self, now: float, batches: int) -> None:
        """What CPU this process and they took since the last reading; before an epoch's first one they started."""
        figures, own, count = self._figures, os.getpid(), len(self._processes)
        times = {pid: CpuTimes.of_process(pid) for pid in (own, *self._pids())}
        if self._reading is not None:
            then, earlier_batches, earlier = self._reading
            others = (earlier.keys() & times.keys()) - {own}  # the number of workers may have changed
            busy_s = {pid: times[pid].cpu_s - earlier[pid].cpu_s for pid in (own, *others)}
            all_busy_s = busy_s.pop(own) + sum(busy_s.values()) * count / max(1, len(others))
            figures.read_s += now - then
            figures.busy_s += all_busy_s
            figures.count("busy cores", now, all_busy_s / (now - then))
            for pid in others:
                figures.in_workers.add((batches - earlier_batches) / count, earlier[pid], times[pid])
        self._reading = now, batches, times
        if self._log.sampled is not None:
            uses = [process_use(PROC / str(pid)) for pid in times]
            of_workers = sum(use.rss_bytes for use in uses[1:] if use is not None)
            figures.count("memory of a worker, MiB", now, of_workers / max(1, len(uses) - 1) / 2**20)
            figures.count(
                "memory of the training process, MiB", now, uses[0].rss_bytes / 2**20 if uses[0] else math.nan
            )

    def _look_at_memory(self) -> None:
        """Once in a while: how much of the memory that one of them shared with this process it has copied."""
        parent, pids = self._log.parent, self._pids()
        if parent is None or not pids or not self._may_read(pids[0], self._log.totals.active_s):
            return
        copied = copied_bytes(pids[0], parent.own_bytes)
        self._found.copied_bytes = max(self._found.copied_bytes, copied or 0)

    def look_at_idle(self, now: float, moment: float, active_s: float) -> None:
        """Nobody may have asked for a batch since a moment: for how long, and how much memory is theirs alone.

        `active_s` is the training's time with the loader that is iterated meanwhile.
        """
        if now < moment + IDLE_S:
            self._is_idle_known = False
            return
        alive = [each for each in self._processes if each.is_alive()]
        if not alive:
            return
        self._found.idle_s += now - max(moment, self._idle_since)
        self._idle_since = now
        pid = alive[0].pid
        if not self._is_idle_known and self._may_read(pid, active_s):
            self._is_idle_known = True
            self._found.idle_bytes = max(self._found.idle_bytes, len(alive) * (private_bytes(pid) or 0))

    def _may_read(self, pid: int, active_s: float) -> bool:
        """Whether the memory of a process may be looked at by now."""
        use = process_use(PROC / str(pid))
        seconds = self._found.memory_s + MEMORY_S_PER_BYTE * (0 if use is None else use.rss_bytes)
        if use is None or seconds > MEMORY_S + MEMORY_SHARE * active_s:
            return False
        self._found.memory_s = seconds
        return True


@functools.cache
def gpu_meter() -> GpuMeter:
    """Of the GPU that is the current one when it is asked for first."""
    return GpuMeter("cuda")


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Dense tensors in Python's own containers and in classes derived from these, whose own methods are not called."""
    if type(batch) is torch.Tensor:
        if batch.layout is torch.strided and not batch.is_nested:
            yield batch
        return
    for kind in (list, tuple, dict):
        if issubclass(type(batch), kind):
            for each in dict.values(batch) if kind is dict else kind.__iter__(batch):
                yield from tensors_in(each)


def samples_in(batch: Any) -> int:
    """Samples of a batch that nobody counted: the first dimension of its first tensor, or a list's length; else 0."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim()), None)
    if first is not None:
        return first.shape[0]
    return len(batch) if type(batch) is list else 0
