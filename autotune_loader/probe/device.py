"""The GPU that a step runs on, as a burst sees it: when it did what, how much memory it took, and letting go of it.

A GPU runs behind the host, which hands it work and goes on. So marks are laid between its pieces of work, and read when it
has passed them; it is waited for at the window's edges only, since waiting in between would change what is measured.

    host     batch 1 ── hand over ── batch 2 ── hand over ── batch 3 ...
    device              copy 1 │ step 1 ─────────────│ copy 2 │ step 2 ─────────────│
                       before  copied             done=before copied              done

Here is all that knows of accelerators in a burst; a step on the CPU has no timeline, its host's clock tells everything.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autotune_loader.pipeline.prefetch import CudaLane, Lane
from autotune_loader.pipeline.trace_log import Fetch
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace

# Batches that the host may be ahead of the device. CUDA itself stops it after about 1,000 kernels, which may be seconds of
# steps that are still to be waited for when the burst is over; this many keep any device busy.
MOST_AHEAD = 16


class Timeline(Protocol):
    """A device that works behind the host. Times are seconds of the host's clock."""

    is_cold: bool
    """Whether memory was given back since the step was warm: its next run has to ask the driver for it again."""

    def now(self) -> float:
        """The host's clock."""

    def open(self) -> None:
        """The window's first edge: wait until the device is idle, and begin to count its time."""

    def mark(self) -> Any:
        """A mark behind all that the device was given so far; costs no waiting."""

    def passed(self, mark: Any) -> float | None:
        """When the device passed a mark; None while it has not."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has passed a mark; what was given to it after that goes on."""

    def synchronize(self) -> None:
        """The window's last edge: wait until the device has done all it was given."""

    def make_lane(self) -> CopyLane:
        """A way to copy batches ahead of the step."""

    def peak_bytes(self) -> int | None:
        """Most memory that was taken on the device since `open`; None where it does not tell."""

    def release(self) -> None:
        """Give back memory that is held for later. Never raises: it is called when something else went wrong."""


class CopyLane(Lane, Protocol):
    """A lane that lays marks before and behind each copy."""

    def copies(self) -> list[tuple[Any, Any]]:
        """The marks of every copy so far."""


class EventTimeline:
    """An accelerator, by events on its current stream: CUDA, ROCm, XPU and whatever else torch gives such a module.

    Args:
        device: such as `torch.device("cuda:1")`; without an index it is the current one.
        module: torch's own for that kind of device, such as `torch.cuda` or `torch.xpu`. What it lacks beside events (peak
            memory, streams, a choice of devices) is left out.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._lane: _TimedLane | None = None
        self._zero: Any = None
        self._zero_s = 0.0
        self.is_cold = False

    def now(self) -> float:
        return time.monotonic()

    def open(self) -> None:
        if self._device.index is not None and hasattr(self._module, "set_device"):
            # The pinning thread uses the current device; on another one it would open a context, which takes memory.
            self._module.set_device(self._device)
        self.synchronize()
        if hasattr(self._module, "reset_peak_memory_stats"):
            self._module.reset_peak_memory_stats(self._device)
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_s = self.now()

    def mark(self) -> Any:
        event = _event(self._module)
        event.record(*([self._module.current_stream(self._device)] if hasattr(self._module, "current_stream") else []))
        return event

    def passed(self, mark: Any) -> float | None:
        if not mark.query():
            return None
        return float(self._zero_s + self._zero.elapsed_time(mark) / 1e3)

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def synchronize(self) -> None:
        # MPS has but one device, and takes none here.
        self._module.synchronize(*([self._device] if hasattr(self._module, "set_device") else []))

    def make_lane(self) -> CopyLane:
        if self._lane is None:  # kept: each new stream would fill a memory pool of its own
            self._lane = _TimedLane(self._device)
        self._lane.forget()
        return self._lane

    def peak_bytes(self) -> int | None:
        if not hasattr(self._module, "max_memory_allocated"):
            return None
        return int(self._module.max_memory_allocated(self._device))

    def release(self) -> None:
        gc.collect()
        self.is_cold = True
        with contextlib.suppress(RuntimeError):  # after a failed kernel every call fails
            self._module.empty_cache()


def _event(module: Any) -> Any:
    # Blocking: a host that waits for it sleeps, where it would otherwise spin and take a core from the workers.
    return module.Event(enable_timing=True, **({"blocking": True} if module is torch.cuda else {}))


class _TimedLane(CudaLane):
    """Copies on a side stream, with events before and behind each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, non_blocking=True)
        self._copies: list[tuple[Any, Any]] = []

    def send(self, batch: Any) -> tuple[Any, Any]:
        before = self.stream.record_event(_event(torch.cuda))
        sent = super().send(batch)
        self._copies.append((before, self.stream.record_event(_event(torch.cuda))))
        return sent

    def copies(self) -> list[tuple[Any, Any]]:
        return self._copies

    def forget(self) -> None:
        """Begin anew, without the copies so far."""
        self._copies = []


def timeline_of(device: torch.device) -> Timeline | None:
    """The timeline of a device; None for a CPU, and for devices without events, whose steps the host's clock times."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return EventTimeline(device, module) if hasattr(module, "Event") else None


def held_bytes(device: str) -> int:
    """What torch has allocated on a CUDA device in this process; asks for nothing that would open CUDA."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") and torch.cuda.is_initialized() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One batch as the host saw it, with the marks that the device passes later."""

    fetch: Fetch
    requested: float
    received: float
    before: Any
    """Mark before the batch's copy."""
    copied: Any
    done: Any
    """Mark behind the step."""
    step_end: float
    """When the host was through with the step."""


class DeviceTimes:
    """Passages on their way to become traces, in order.

    The trace of a batch tells what the device saw: asked for when the device was free, received when it lay on the device,
    done when device and host were through with it. A host that runs ahead of its device thus shows no waiting.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._on_the_way: deque[Passage] = deque()
        self._free = 0.0
        self._copy_s: list[float] = []
        self._steps: list[tuple[float, float]] = []

    def note(self, passage: Passage) -> None:
        """Keep a batch in mind, and hold the host when it is too far ahead; the device does not notice."""
        self._on_the_way.append(passage)
        if len(self._on_the_way) > MOST_AHEAD:
            self._timeline.wait(self._on_the_way[-MOST_AHEAD].done)

    def settled(self) -> list[BatchTrace]:
        """The traces of batches that the device has done since this was last asked."""
        traces = []
        while self._on_the_way:
            trace = self._trace_of(self._on_the_way[0])
            if trace is None:
                break
            self._on_the_way.popleft()
            traces.append(trace)
        return traces

    def copy_s(self, lane: CopyLane | None) -> float | None:
        """Mean seconds of the copy to the device, by the lane's marks where copies ran ahead; None before any ran."""
        seconds = self._copy_s if lane is None else self._copies_of(lane)
        return sum(seconds) / len(seconds) if seconds else None

    def busy_share(self, start: float, end: float) -> float | None:
        """Share of the time between two moments in which the device was on a step; None for no time at all."""
        if end <= start:
            return None
        return sum(max(0.0, min(done, end) - max(begun, start)) for begun, done in self._steps) / (end - start)

    def _copies_of(self, lane: CopyLane) -> list[float]:
        ends = [(self._timeline.passed(before), self._timeline.passed(behind)) for before, behind in lane.copies()]
        return [behind - before for before, behind in ends if before is not None and behind is not None]

    def _trace_of(self, seen: Passage) -> BatchTrace | None:
        done = self._timeline.passed(seen.done)
        before, copied = self._timeline.passed(seen.before), self._timeline.passed(seen.copied)
        if done is None or before is None or copied is None:
            return None
        self._copy_s.append(max(0.0, copied - before))
        self._steps.append((copied, done))
        requested = max(seen.requested, self._free)
        fetch_start, fetch_end, collate_end = _as_it_cost(seen, requested)
        received = max(seen.received, collate_end, requested, copied)
        self._free = max(seen.step_end, received, done)
        return BatchTrace(
            worker=seen.fetch[0],
            fetch_start=fetch_start,
            fetch_end=fetch_end,
            collate_end=collate_end,
            cpu_s=seen.fetch[4],
            requested=requested,
            received=received,
            step_end=self._free,
            samples=seen.fetch[5],
        )


def _as_it_cost(seen: Passage, requested: float) -> tuple[float, float, float]:
    """When a batch was fetched; of a fetch in the main process the part that the device had to wait for.

    The main process fetches while the device still steps on the batch before. With copies ahead it fetches a later batch
    than it hands out: each hand-out then stands for a fetch at that moment.
    """
    worker, fetch_start, fetch_end, collate_end, *_ = seen.fetch
    if worker != MAIN_PROCESS:
        return fetch_start, fetch_end, collate_end
    late = max(0.0, seen.requested - fetch_start)
    return max(fetch_start + late, requested), max(fetch_end + late, requested), max(collate_end + late, requested)
