"""A workload loaded and warmed up, ready to be burst: what runs in the process of the bursts."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autotune_loader.bursts.checks import REPEATED_SAMPLES, positions, why_no_workers, workers_repeat_each_other
from autotune_loader.bursts.device import Timeline
from autotune_loader.bursts.failures import failure_of, user_traceback
from autotune_loader.bursts.files import STEP_WRITES, refused_path
from autotune_loader.bursts.loop import Cached, run_burst
from autotune_loader.bursts.protocol import Announce, Request, WarmupReport
from autotune_loader.bursts.samples import Raised, good, named_samples
from autotune_loader.bursts.step import StepError, StepInferenceError, TrainingStep, build_step
from autotune_loader.pipeline.batches import BatchShape, samples_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, FailurePhase, Measurement

SECOND_LOOK_S = 0.5
"""A first batch that took no longer is looked at twice: a cold file or a busy machine is no habit."""
SLOW_FETCH_S = 2.0
"""A burst of half a second has no room for several batches that take longer to fetch."""
WARM_UP_STEPS, WARM_UP_S = 3, 1.0
"""The first steps are slow (allocator, thread pools, cuDNN's choice of algorithms): that many, or that long, is enough."""
MOST_WARM_UP_STEPS, SETTLED = 10, 1.2
"""On a device torch.compile compiles in the first step, may do so again in the second and records graphs in the third: it is
warm when two steps in a row take the same time, and not before the second."""
READS_BY_ITSELF = (
    "The dataset reads by a DataLoader of its own, which other workers cannot share, so none are tried (num_workers=0). The "
    "num_workers to try is the dataset's own."
)
BATCHES_COUNTED = (
    "How many samples a batch has cannot be told: it is made by the dataset, and holds no tensor with a first dimension. "
    "Every batch counts as one sample, so rates are batches/s."
)
SLOW_BATCHES = (
    "A batch takes {seconds:.0f} s to fetch in one process, and a burst needs several of them: raise the budget, or tune "
    "with a smaller batch_size."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """What is known once one or two batches have been fetched."""

    batch: Any
    samples: int
    first_s: float
    """Wall seconds that the very first took."""
    wall_s: float
    """Wall seconds that one takes, and CPU seconds."""
    cpu_s: float


class EverywhereError(WorkloadError):
    """The workload fails in whatever process it runs."""


class Bench:
    """Runs bursts of one workload in this process.

    Args:
        data: what workers inherit; the main process never fetches from it.
        read_private: gives a data side that the main process may fetch from, filled caches and open handles and all.
        training: model, step and optimizer, as training would begin with them.
        seed: of the run's reading; another one begins at another place.
    """

    def __init__(
        self, data: DataSide, read_private: Callable[[], DataSide], training: TrainingSide, seed: int = 0
    ) -> None:
        self._data, self._read_private, self._training = data, read_private, training
        self._seed, self._reading = seed, Reading(data, seed)
        self._first: FirstBatch | None = None
        self._step: TrainingStep | None = None
        self._timeline: Timeline | None = None

    def prepare(self, announce: Announce = lambda phase: None) -> WarmupReport | Failure:
        """Fetch one batch in this process, build the step from it and warm the step up.

        Raises:
            WorkloadError: a sample, or the step, raised.
        """
        phase: FailurePhase = "first_batch"
        try:
            announce(phase)
            private, before = self._read_private(), positions()
            first = self._first = self._fetch_first(private)
            why_none = why_no_workers(private, first.batch, before)
            phase = "step"
            announce(phase)
            step = self._step = build_step(self._training, first.batch)
            self._timeline = None if step.device.type != "cuda" else Timeline(step.device)
            step_s = warm_up(step, first.batch, self._timeline)
        except StopIteration:
            return Failure(kind="no_data", phase=phase, message="the dataset delivered no batch")
        except (Raised, StepError) as error:
            raise self._ends_run(error) from None
        except StepInferenceError as error:
            raise EverywhereError(str(error), user_traceback(error.__cause__ or error)) from None
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return failure_of(error, phase)
        finally:
            forget_open_batch()
        return self._report(step, first, private, step_s, why_none)

    def run(self, request: Request, announce: Announce = lambda phase: None) -> Measurement | Failure:
        """A burst with workers or without, or the step on the first batch again and again.

        Raises:
            WorkloadError: a sample, or the step, raised, by no fault of the configuration.
        """
        step, has_workers = self._step, request.config.num_workers > 0
        assert step is not None, "prepare() comes first"
        try:
            data = self._data if has_workers or request.what == "step_ceiling" else self._read_private()
            return run_burst(
                request, step, lambda: self._loader(request, named_samples(data)), self._timeline, announce
            )
        except Raised as error:
            if has_workers and not error.writes and not error.raises_in(self._read_private()):
                message = f"{error.failure.message}, in a worker, and not when it is read again alone"
                return Failure(
                    kind="user_exception", phase="batches", message=message, traceback=error.failure.traceback
                )
            raise self._ends_run(error) from None
        except StepError as error:
            if request.config.batch_size is not None and error.__cause__ is not None:
                return failure_of(error.__cause__, "step")  # a size that was not the user's own
            raise self._ends_run(error) from None

    def begin_elsewhere(self) -> None:
        """Let the next burst read other samples, where nothing is heard of how far the last one came."""
        self._seed += 1
        self._reading = Reading(self._data, self._seed)

    def _loader(self, request: Request, data: DataSide) -> Any:
        if request.what == "burst":
            return make_traced_loader(data, request.config, self._reading, stages=request.plan.stages)
        first, size = self._first, request.plan.batch_size
        assert first is not None, "prepare() comes first"
        if size in (None, first.samples):
            return Cached(first.batch, first.samples)
        private = named_samples(self._read_private())
        batch, fetch = next(iter(make_traced_loader(private, LoaderConfig(batch_size=size), self._reading)))
        return Cached(good(batch), fetch[5])

    def _ends_run(self, error: Raised | StepError) -> WorkloadError:
        """What no other configuration would be without."""
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, Raised):
            kind = EverywhereError if error.writes else WorkloadError
            return kind(error.ends_run.message, error.ends_run.traceback or "")
        cause, step = error.__cause__ or error, self._step
        if (path := refused_path(cause)) is None:
            return WorkloadError(failure_of(cause, "step").message, user_traceback(cause))
        name = "train_step" if step is not None and step.is_own else "the step"
        return EverywhereError(STEP_WRITES.format(step=name, path=path), user_traceback(cause))

    def _fetch_first(self, data: DataSide) -> FirstBatch:
        """Fetch the batch that the step is warmed up on, and another where that takes no time.

        Raises:
            StopIteration: there is none.
            Raised: a sample raised.
        """
        batches = iter(make_traced_loader(named_samples(data), LoaderConfig(), self._reading))
        first, seen = None, list[tuple[float, float, int]]()
        while not seen or (len(seen) < 2 and seen[0][0] <= SECOND_LOOK_S):
            begun = time.monotonic()
            try:
                batch, fetch = next(batches)
            except StopIteration:
                if not seen:
                    raise
                break  # the first batch was all there is
            first = good(batch) if not seen else first
            seen.append((time.monotonic() - begun, fetch[4], fetch[5]))
        wall_s, cpu_s, _ = max(seen, key=lambda each: each[1] / max(each[0], 1e-9))
        return FirstBatch(batch=first, samples=seen[0][2], first_s=seen[0][0], wall_s=wall_s, cpu_s=cpu_s)

    def _report(
        self, step: TrainingStep, first: FirstBatch, private: DataSide, step_s: float, why_none: list[str]
    ) -> WarmupReport:
        """What the first batches tell of the workload, and what workers make of it."""
        shape, data = BatchShape.of(first.batch), self._data
        counts_batches = not data.is_batched and first.samples == 1 and samples_in(first.batch) is None
        reads_by_itself = not shape.on_accelerator and (data.reads_by_itself or private.reads_by_itself)
        alone = shape.on_accelerator or reads_by_itself
        repeats = data.is_iterable and not alone and workers_repeat_each_other(data, first.first_s)
        told = {
            BATCHES_COUNTED: counts_batches,
            READS_BY_ITSELF: reads_by_itself,
            SLOW_BATCHES.format(seconds=first.wall_s): first.wall_s > SLOW_FETCH_S,
            REPEATED_SAMPLES: repeats,
            self._reading.note or "": self._reading.note is not None,
        }
        return WarmupReport(
            step=step.description,
            samples=first.samples,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            on_accelerator=shape.on_accelerator,
            first_fetch_s=first.wall_s,
            first_fetch_cpu_s=first.cpu_s,
            step_s=step_s,
            first_batch_s=first.first_s,
            counts_batches=counts_batches,
            reads_by_itself=reads_by_itself,
            shardable=not repeats,
            same_in_workers=alone or not why_none,
            default_threads=torch.get_num_threads(),
            notes=(*step.notes, *(note for note, holds in told.items() if holds), *([] if alone else why_none)),
        )


def warm_up(step: TrainingStep, batch: Any, timeline: Timeline | None) -> float:
    """Run the step until it takes what it will take from now on; the seconds of the quickest."""
    now, took = time.monotonic, list[float]()
    if timeline is not None:
        timeline.open()
        now = timeline.now
    while not (_is_warm(took) if timeline is not None else len(took) >= WARM_UP_STEPS or sum(took) > WARM_UP_S):
        begun = now()
        step.run(batch)
        if timeline is not None:
            timeline.synchronize()
        took.append(now() - begun)
    return min(took)


def _is_warm(took: list[float]) -> bool:
    """Whether steps on a device have settled, or are so long that waiting for it costs more than it tells."""
    if len(took) < 2:
        return False
    if len(took) * min(took) > WARM_UP_S or len(took) >= MOST_WARM_UP_STEPS:
        return True
    return len(took) >= WARM_UP_STEPS and max(took[-2:]) <= SETTLED * min(took[-2:])
