"""A running burst: it takes batches, trains on them, notes when, and knows when to stop.

A step on the CPU is timed by the host's clock. A step on a device that works behind the host is timed by that device's own
(see `probe.device`), which is read when it has come so far, never waited for before the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.pipeline.batches import bytes_of, tensors_in
from autotune_loader.pipeline.stages import StageTally
from autotune_loader.pipeline.throughput import is_enough, summarise
from autotune_loader.pipeline.trace_log import REPORTED, History
from autotune_loader.probe.device import CopyLane, DeviceTimes, Passage, Timeline
from autotune_loader.probe.failures import is_of_dataset
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.measurement import BadSample, FailurePhase, GpuUse, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import BatchTrace

# How often the running burst asks whether it knows enough, in seconds: cheap against any batch worth prefetching.
STOP_CHECK_S = 0.05
# After a check that took t seconds the next one waits this many t: checking takes at most a quarter of a percent.
STOP_CHECK_COST = 400.0
# One batch to open the window and one inside it.
FEWEST_BATCHES = 2
# A burst of tiny in-memory batches delivers tens of thousands; its record keeps at most this many.
KEPT_TRACES = 2048
# The step may raise for one batch in so many (a label out of range, say), and for the first that it meets.
ODD_SHARE = 8
Announce = Callable[[FailurePhase], None]
"""Told which phase begins, so that a parent can name it when the process hangs or dies."""


class Run:
    """The state of one running burst: the batches so far and when to stop."""

    def __init__(
        self,
        plan: BurstPlan,
        workers: int,
        started: float,
        enter: Announce = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._started = started
        self._history = History()
        self._stages = StageTally()
        self._shape: BatchShape | None = None
        self._batch: Any = None
        """The latest: it lives until the next one has arrived, as in `for batch in loader`. Once it is gone malloc may give its
        memory back, and the next fetch in this process has to write to fresh pages."""
        self._raised: list[Exception] = []
        """By the step, for batches that the run went on without."""
        self._next_check = 0.0
        self._enter = enter
        self._clock = clock

    def deliver(self, iterator: Iterator[Any], step: TrainingStep) -> bool:
        """Take one batch and train on it; False when the loader has ended."""
        requested = time.monotonic()
        try:
            self._batch, fetch = next(iterator)
        except StopIteration:
            return False
        received = time.monotonic()
        if self._shape is None:
            self._shape = BatchShape.of(self._batch)
        if len(fetch) == REPORTED:
            self._stages.add(fetch[-1])
        try:
            step.run(self._batch)
        except Exception as error:
            self._go_on_after(error)
            return True
        self._history.note((fetch, requested, received, time.monotonic()))
        return True

    def now(self) -> float:
        """Seconds of the clock that the traces are on."""
        return self._clock()

    def samples(self, first: int, end: int) -> int:
        """Samples of the batches from `first` up to `end`, once `measurement()` has been taken."""
        return sum(trace.samples for trace in self._history[first:end])

    def step_ends(self, counts: Sequence[int]) -> list[float]:
        """When so many batches were done, by whatever did the last of them; once `measurement()` has been taken."""
        return [self._history[count - 1].step_end for count in counts]

    def gpu_use(self, start: float, end: float) -> GpuUse:  # noqa: ARG002 - a run on a device needs them
        """What the run itself knows of the device, between two moments."""
        return GpuUse(reason="not measured")

    def knows_enough(self) -> bool:
        now = self._clock()
        if now < self._next_check or not self._settled():
            return False
        enough = is_enough(self._history, self._plan, workers=self._workers, now=now)
        self._next_check = now + max(STOP_CHECK_S, STOP_CHECK_COST * (self._clock() - now))
        return enough

    def _settled(self) -> bool:
        """Whether there is a window to judge by, be its steps as long as they may."""
        return len(self._history) >= FEWEST_BATCHES

    def _go_on_after(self, error: Exception) -> None:
        """Leave out a batch that the step has raised for, if such batches are few; no memory is no fault of a batch."""
        self._enter("step")
        self._raised.append(error)
        if not is_of_dataset(error) or len(self._raised) > 1 + len(self._history) // ODD_SHARE:
            raise error
        self._enter("batches")

    def measurement(self) -> Measurement:
        """What the run amounts to."""
        traces, shape = list(self._history), self._shape or BatchShape()
        measured, end = summarise(traces, workers=self._workers, started=self._started), self._history[-1].step_end
        return replace(
            measured,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            gpu=self.gpu_use(end - measured.window_s, end),
            traces=tuple(_worth_keeping(traces)),
            stages=self._stages.samples(),
            bad_samples=tuple(BadSample.of("the step on a batch", error) for error in self._raised[:1]),
        )


class DeviceRun(Run):
    """A run whose step is done by a device that works behind the host."""

    def __init__(
        self,
        plan: BurstPlan,
        workers: int,
        started: float,
        timeline: Timeline,
        lane: CopyLane | None = None,
        enter: Announce = lambda phase: None,
    ) -> None:
        super().__init__(plan, workers, started, enter, timeline.now)
        self._timeline = timeline
        self._times = DeviceTimes(timeline)
        self._lane = lane

    def deliver(self, iterator: Iterator[Any], step: TrainingStep) -> bool:
        """Take one batch and hand it to the device; False when the loader has ended."""
        timeline = self._timeline
        requested = timeline.now()
        try:
            self._batch, fetch = next(iterator)
        except StopIteration:
            return False
        received, before = timeline.now(), timeline.mark()
        if self._shape is None:
            self._shape = BatchShape.of(self._batch)
        if len(fetch) == REPORTED:
            self._stages.add(fetch[-1])
        try:
            on_device = step.move(self._batch)
            copied = timeline.mark()
            step.train(on_device)
        except Exception as error:
            self._go_on_after(error)
            return True
        self._times.note(
            Passage(
                fetch=fetch,
                requested=requested,
                received=received,
                before=before,
                copied=copied,
                done=timeline.mark(),
                step_end=timeline.now(),
            )
        )
        return True

    def _settled(self) -> bool:
        for trace in self._times.settled():
            self._history.note(trace)
        return super()._settled()

    def gpu_use(self, start: float, end: float) -> GpuUse:
        return replace(
            super().gpu_use(start, end),
            busy_share=self._times.busy_share(start, end),
            memory_bytes=self._timeline.peak_bytes(),
            allocated_bytes=self._timeline.peak_bytes(),
            copy_s=self._times.copy_s(self._lane),
        )

    def measurement(self) -> Measurement:
        """What the run amounts to, once the device has finished what it was given."""
        self._timeline.synchronize()
        self._settled()
        return super().measurement()


def _worth_keeping(traces: list[BatchTrace]) -> list[BatchTrace]:
    """The start and the end of a long burst: enough to draw and to model, bounded for the pipe."""
    return traces if len(traces) <= KEPT_TRACES else traces[: KEPT_TRACES // 8] + traces[-(KEPT_TRACES * 7 // 8) :]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How much one batch carries between processes."""

    bytes: int = 0
    tensors: int = 0
    on_accelerator: bool = False

    @classmethod
    def of(cls, batch: Any) -> BatchShape:
        tensors = list(tensors_in(batch))
        return cls(
            bytes=sum(map(bytes_of, tensors)),
            tensors=len(tensors),
            on_accelerator=any(tensor.device.type != "cpu" for tensor in tensors),
        )
