"""The accelerator that a step runs on: when it did what, and how much memory it took. The CPU has no timeline.

The device runs behind the host, which hands it work and goes on. So marks are laid between its pieces of work, and read when
it has passed them; it is waited for at the window's edges only, since waiting in between would change what is measured.

    host     batch 1 ── hand over ── batch 2 ── hand over ── batch 3 ...
    device              copy 1 │ step 1 ─────────────│ copy 2 │ step 2 ─────────────│
                               copied             done        copied              done
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean
from typing import Any, NamedTuple

import torch

from autotune_loader.machine.nvml import GpuMeter
from autotune_loader.pipeline.batches import Lane, accelerator
from autotune_loader.pipeline.tracing import Fetch
from autotune_loader.values import MAIN_PROCESS, BatchTrace

FEWEST_AHEAD, MOST_AHEAD_S = 2, 0.05
"""Steps, or seconds of them, that the host may be ahead of the device: that keeps it busy, and what is handed over has still to
be waited for when the burst is over."""


class Timeline:
    """An accelerator, by events on its current stream. Times are seconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, accelerator(device)
        self.lane = Lane(device)
        """A way to copy batches ahead of the step; one, since each new stream would fill a memory pool of its own."""
        self.gpu = GpuMeter(device)

    def open(self) -> None:
        """Wait until the device is idle, and begin to count its time."""
        self.gpu.ended.set()  # of a burst that failed
        if self._device.index is not None:
            # The pinning thread uses the current device; on another one it would open a context, which takes memory.
            self._module.set_device(self._device)
        self.synchronize()
        self._module.reset_peak_memory_stats(self._device)
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_s = time.monotonic()

    def mark(self) -> Any:
        """A mark behind all that the device was given so far."""
        # Blocking: a host that waits for it sleeps, where it would otherwise spin and take a core from the workers.
        event = self._module.Event(enable_timing=True, blocking=True)
        event.record(self._module.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> float | None:
        """When the device passed a mark; None while it has not."""
        return float(self._zero_s + self._zero.elapsed_time(mark) / 1e3) if mark.query() else None

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self._module.synchronize(self._device)

    def peak_bytes(self) -> int:
        """Most memory that torch has allocated on the device since `open`."""
        return int(self._module.max_memory_allocated(self._device))


class Passage(NamedTuple):
    """One batch as the host saw it, with the marks behind its copy and its step that the device passes later."""

    fetch: Fetch
    pinned: tuple[float | None, float | None]
    requested: float
    received: float
    copied: Any
    done: Any
    step_end: float


class Passages:
    """Batches on their way to become traces, in order, which tell what the device saw.

    A batch is asked for when the device is free, received when it lies on the device, done when device and host are through
    with it. A host that runs ahead of its device thus shows no waiting.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._on_the_way: deque[Passage] = deque()
        self._free = 0.0
        self._steps: list[tuple[float, float, float]] = []
        """Seconds that the copy of each kept it from beginning, when it began, and when it was done."""

    def note(self, passage: Passage) -> None:
        """Take a batch in, and hold the host when it is too far ahead; with the first one the window has opened."""
        if not self._steps and not self._on_the_way:
            self._timeline.gpu.begin()
        self._on_the_way.append(passage)
        _, begun, done = self._steps[-1] if self._steps else (0.0, 0.0, MOST_AHEAD_S)
        most = max(FEWEST_AHEAD, int(MOST_AHEAD_S / max(done - begun, 1e-6)))
        if len(self._on_the_way) > most:
            self._timeline.wait(self._on_the_way[-most - 1].done)

    def settled(self) -> list[BatchTrace]:
        """Traces of the batches that the device has done since the last call."""
        traces = []
        while self._on_the_way and (trace := self._trace_of(self._on_the_way[0])) is not None:
            self._on_the_way.popleft()
            traces.append(trace)
        return traces

    def use(self, start: float, end: float) -> dict[str, Any]:
        """What is known of the device between two moments, by fields of `Measurement`."""
        at_work = sum(max(0.0, min(done, end) - max(begun, start)) for _, begun, done in self._steps)
        busy_share = at_work / (end - start) if end > start else None
        copies = [copy_s for copy_s, begun, _ in self._steps if start <= begun <= end]
        copy_s, of_all = fmean(copies) if copies else None, self._timeline.gpu.end(start, end)
        of_job = {"gpu_busy_share": busy_share, "copy_s": copy_s, "gpu_memory_bytes": self._timeline.peak_bytes()}
        return {**of_job, "gpu_utilization": of_all.utilization, "gpu_used_bytes": of_all.used_bytes}

    def _trace_of(self, seen: Passage) -> BatchTrace | None:
        copied, done = self._timeline.passed(seen.copied), self._timeline.passed(seen.done)
        if done is None or copied is None:
            return None
        free = self._steps[-1][2] if self._steps else 0.0
        self._steps.append((max(0.0, copied - max(seen.received, free)), copied, done))
        requested = max(seen.requested, self._free)
        worker, fetch_start, fetch_end, collate_end, cpu_s, samples = seen.fetch[:6]
        if worker == MAIN_PROCESS:
            # It fetches while the device still steps on the batch before: only what the device had to wait for is a cost.
            # With copies ahead it fetches a later batch than it hands out.
            late = max(0.0, seen.requested - fetch_start)
            fetch_start, fetch_end, collate_end = (
                max(moment + late, requested) for moment in (fetch_start, fetch_end, collate_end)
            )
        received = max(seen.received, collate_end, requested, copied)
        self._free = max(seen.step_end, received, done)
        fetched = worker, fetch_start, fetch_end, collate_end, cpu_s, samples
        return BatchTrace(*fetched, requested, received, self._free, *seen.pinned)
