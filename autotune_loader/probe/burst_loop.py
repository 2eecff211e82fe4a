"""A running burst: it takes batches, trains on them, notes when, knows when to stop, and builds what was measured.

A step on the CPU is timed by the host's clock. A step on a device that works behind the host is timed by that device's own
(see `probe.device`), which is read when it has come so far, never waited for before the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autotune_loader.pipeline.batches import bytes_of, tensors_in
from autotune_loader.pipeline.stages import pooled
from autotune_loader.pipeline.throughput import is_enough, summarise, wait_share
from autotune_loader.pipeline.tracing import REPORTED, Fetch
from autotune_loader.probe.bad_samples import good
from autotune_loader.probe.device import Passage, Passages, TimedLane, Timeline
from autotune_loader.probe.failures import is_of_dataset
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.measurement import BadSample, FailurePhase, GpuUse, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.stages import StageSamples
from autotune_loader.values.statistics import Interval, mean_interval
from autotune_loader.values.trace import BatchTrace

# How often the running burst asks whether it knows enough, in seconds: cheap against any batch worth prefetching.
STOP_CHECK_S = 0.05
# After a check that took t seconds the next one waits this many t: checking takes at most a quarter of a percent.
STOP_CHECK_COST = 400.0
# One batch to open the window and one inside it.
FEWEST_BATCHES = 2
# A burst of tiny in-memory batches delivers tens of thousands; its record keeps its start and its end, so many in all.
KEPT_FIRST, KEPT_LAST = 256, 1792
# The step may raise for one batch in so many (a label out of range, say), and for the first that it meets.
ODD_SHARE = 8
Announce = Callable[[FailurePhase], None]
"""Told which phase begins, so that a parent can name it when the process hangs or dies."""


class Run:
    """The state of one running burst: the batches so far and when to stop.

    Args:
        plan: how long.
        workers: worker processes.
        started: when the iterator was created, in seconds.
        enter: told which phase begins.
        timeline: of the device that the step runs on, where that works behind the host.
        lane: where batches are copied ahead of the step.
        bad: samples that have raised before, by name; what the step raises for is added.
    """

    def __init__(
        self,
        plan: BurstPlan,
        workers: int,
        started: float,
        enter: Announce = lambda phase: None,
        timeline: Timeline | None = None,
        lane: TimedLane | None = None,
        bad: dict[str, BadSample] | None = None,
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._started = started
        self._enter = enter
        self._timeline = timeline
        self._passages = None if timeline is None else Passages(timeline, lane)
        self._bad = {} if bad is None else bad
        self._traces: list[BatchTrace] = []
        self._stages: list[StageSamples] = []
        self._shape: BatchShape | None = None
        self._batch: Any = None
        """The latest: it lives until the next one has arrived, as in `for batch in loader`. Once it is gone malloc may give its
        memory back, and the next fetch in this process has to write to fresh pages."""
        self._raised = 0
        """How many batches the run went on without, since the step raised for them."""
        self._next_check = 0.0
        self.now = time.monotonic if timeline is None else timeline.now
        """Seconds of the clock that the traces are on."""

    def deliver(self, iterator: Iterator[Any], step: TrainingStep) -> bool:
        """Take one batch and train on it, or hand it to the device; False when the loader has ended."""
        timeline, now = self._timeline, self.now
        fetch: Fetch
        requested = now()
        try:
            self._batch, fetch = next(iterator)
        except StopIteration:
            return False
        good(self._batch)
        received = now()
        if self._shape is None:
            self._shape = BatchShape.of(self._batch)
        if len(fetch) == REPORTED:
            self._stages.append(fetch[-1])
        try:
            if timeline is None:
                step.run(self._batch)
                self._traces.append(BatchTrace(*fetch[:6], requested, received, now()))
                return True
            before = timeline.mark()
            on_device = step.move(self._batch)
            copied = timeline.mark()
            step.train(on_device)
        except Exception as error:
            self._go_on_after(error)
            return True
        assert self._passages is not None
        self._passages.note(Passage(fetch, requested, received, before, copied, timeline.mark(), now()))
        return True

    def knows_enough(self) -> bool:
        """Whether the burst may end; asks seldom, so that asking costs next to nothing."""
        now = self.now()
        if now < self._next_check:
            return False
        self._settle()
        if len(self._traces) < FEWEST_BATCHES:  # there is no window to judge by, be its steps as long as they may
            return False
        enough = is_enough(self._traces, self._plan, workers=self._workers, now=now)
        self._next_check = now + max(STOP_CHECK_S, STOP_CHECK_COST * (self.now() - now))
        return enough

    def measurement(self, epochs: Sequence[int] = (), opened: float = 0.0) -> Measurement:
        """What the run amounts to, once the device has finished what it was given.

        Args:
            epochs: how many batches had been delivered at the end of each epoch, where whole ones are measured.
            opened: when their window began, should that be behind the end of the first.
        """
        if self._timeline is not None:
            self._timeline.synchronize()
            self._settle()
        traces, shape = self._traces, self._shape or BatchShape()
        measured, end = summarise(traces, workers=self._workers, started=self._started), traces[-1].step_end
        if epochs:
            samples = sum(trace.samples for trace in traces[epochs[0] : epochs[-1]])
            first, *others = (traces[count - 1].step_end for count in epochs)
            measured = over_epochs(measured, [max(first, opened), *others], samples)
        use = None if self._passages is None else self._passages.use(end - measured.window_s, end)
        return replace(
            measured,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            gpu=use or GpuUse(),
            traces=tuple(
                traces if len(traces) <= KEPT_FIRST + KEPT_LAST else traces[:KEPT_FIRST] + traces[-KEPT_LAST:]
            ),
            stages=pooled(self._stages),
            bad_samples=tuple(self._bad.values()),
        )

    def _settle(self) -> None:
        """Make traces of the batches that the device has done by now."""
        if self._passages is not None:
            self._traces += self._passages.settled()

    def _go_on_after(self, error: Exception) -> None:
        """Leave out a batch that the step has raised for, if such batches are few; no memory is no fault of a batch."""
        self._enter("step")
        self._raised += 1
        if not is_of_dataset(error) or self._raised > 1 + len(self._traces) // ODD_SHARE:
            raise error
        bad = BadSample.of("the step on a batch", error)
        self._bad.setdefault(bad.name, bad)
        self._enter("batches")


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


def are_enough_epochs(ends: Sequence[float], plan: BurstPlan, begun: float) -> bool:
    """Whether a burst of whole epochs that began at `begun` (s) and whose epochs ended at `ends` may end."""
    if len(ends) < 2:
        return False
    elapsed = ends[-1] - begun
    # Two epochs in the window and one before it, or, of epochs longer than the plan expects, one and one.
    return elapsed >= 3.0 * plan.max_s or (elapsed >= plan.max_s and len(ends) >= 3)


def over_epochs(measured: Measurement, ends: Sequence[float], samples: int) -> Measurement:
    """The measurement of a burst with the rate of its epochs, and the waiting that start-up and gaps are.

    The first epoch is not timed: what it does once (imports, caches, persistent workers) is nothing over a whole training run.

    Args:
        measured: as `summarise` has it.
        ends: when its epochs ended, at least two.
        samples: of all epochs but the first.
    """
    seconds, window_s = mean_interval([after - before for before, after in pairwise(ends)]), ends[-1] - ends[0]
    half = min((seconds.high - seconds.low) / 2 / seconds.value, math.log(10))
    value = samples / window_s
    rate = Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half), count=seconds.count)
    waits = wait_share(rate, measured.step_s, measured.batch_size)
    return replace(measured, samples_per_s=rate, samples=samples, window_s=window_s, wait_share=waits)
