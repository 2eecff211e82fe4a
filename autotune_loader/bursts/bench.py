"""A workload loaded and warmed up, ready to be burst: what runs in the process of the bursts."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autotune_loader.bursts.checks import REPEATED_SAMPLES, positions, why_no_workers, workers_repeat_each_other
from autotune_loader.bursts.device import Timeline
from autotune_loader.bursts.failures import Raised, checked, failure_of, user_traceback
from autotune_loader.bursts.files import STEP_WRITES, refused_path
from autotune_loader.bursts.loop import Cached, run_burst
from autotune_loader.bursts.protocol import Announce, Message, Request, WarmupReport
from autotune_loader.bursts.step import StepError, StepInferenceError, TrainingStep, build_step
from autotune_loader.pipeline.batches import BatchShape, samples_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, FailurePhase

SECOND_LOOK_S = 0.5
"""A first batch that took no longer is looked at twice: a cold file or a busy machine is no habit."""
SLOW_FETCH_S = 2.0
"""A burst of half a second has no room for several batches that take longer to fetch."""
WARM_UP_STEPS, MOST_WARM_UP_STEPS, WARM_UP_S, SETTLED = 3, 10, 1.0, 1.2
"""The first steps are slow: allocator, thread pools, cuDNN's choice of algorithms. torch.compile compiles in the first, may do
so again in the second and records graphs in the third. A step is warm when it took the same time twice in a row."""
BATCHES_COUNTED = (
    "How many samples a batch has cannot be told: it is made by the dataset, and holds no tensor with a first dimension. "
    "Every batch counts as one sample, so rates are batches/s."
)
SLOW_BATCHES = (
    "A batch takes {seconds:.0f} s to fetch in one process, and a burst needs several of them: raise the budget, or tune "
    "with a smaller batch_size."
)


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
        self._first: Cached | None = None
        self._step: TrainingStep | None = None
        self._timeline: Timeline | None = None

    def prepare(self, announce: Announce = lambda phase: None) -> Message:
        """Fetch one batch in this process, build the step from it and warm the step up; that it is warm, or why not."""
        phase: FailurePhase = "first_batch"
        try:
            announce(phase)
            private, before = self._read_private(), positions()
            first, took = self._fetch_first(private)
            self._first = first
            why_none = why_no_workers(private, first.batch, before)
            phase = "step"
            announce(phase)
            step = self._step = build_step(self._training, first.batch)
            self._timeline = None if step.device.type != "cuda" else Timeline(step.device)
            warm_up(step, first.batch, self._timeline)
        except StopIteration:
            return Message(failure=Failure(kind="no_data", phase=phase, message="the dataset delivered no batch"))
        except (Raised, StepError) as error:
            return Message(failure=self._at_fault(error))
        except StepInferenceError as error:
            told = user_traceback(error.__cause__ or error)
            return Message(failure=Failure(kind="user_exception", phase=phase, message=str(error), traceback=told))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return Message(failure=failure_of(error, phase))
        finally:
            forget_open_batch()
        return Message(ready=self._report(step, first, took, why_none))

    def run(self, request: Request, announce: Announce = lambda phase: None) -> Message:
        """A burst with workers or without, or the step on the first batch again and again."""
        step, has_workers = self._step, request.config.num_workers > 0
        assert step is not None, "prepare() comes first"
        try:
            data = self._data if has_workers or request.what == "step_ceiling" else self._read_private()
            outcome = run_burst(request, step, lambda: self._loader(request, data), self._timeline, announce)
            return Message(failure=outcome) if isinstance(outcome, Failure) else Message(measurement=outcome)
        except Raised as error:
            if has_workers and not error.writes and not error.raises_in(self._read_private()):
                alone = f"{error.failure.message}, in a worker, and not when it is read again alone"
                return Message(failure=replace(error.failure, message=alone))
            return Message(failure=self._at_fault(error), ends_run=True)
        except StepError as error:
            if request.config.batch_size is not None and error.__cause__ is not None:
                return Message(failure=failure_of(error.__cause__, "step"))  # a size that was not the user's own
            return Message(failure=self._at_fault(error), ends_run=True)

    def begin_elsewhere(self) -> None:
        """Let the next burst read other samples, where nothing is heard of how far the last one came."""
        self._seed += 1
        self._reading = Reading(self._data, self._seed)

    def step_writes(self, path: str, error: BaseException | None) -> Failure:
        """The failure of a step that writes to a file of the user's."""
        name = "train_step" if self._training.train_step is not None else "the step"
        message = STEP_WRITES.format(step=name, path=path)
        told = None if error is None else user_traceback(error)
        return Failure(kind="user_exception", phase="step", message=message, traceback=told)

    def _loader(self, request: Request, data: DataSide) -> Any:
        if request.what == "burst":
            stages = request.plan.stages
            return make_traced_loader(data, request.config, self._reading, stages=stages, on_error=Raised.of)
        assert self._first is not None, "prepare() comes first"
        return self._first

    def _at_fault(self, error: Raised | StepError) -> Failure:
        """What no other configuration would be without."""
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, Raised):
            return error.ends_run
        cause = error.__cause__ or error
        path = refused_path(cause)
        return failure_of(cause, "step") if path is None else self.step_writes(path, cause)

    def _fetch_first(self, data: DataSide) -> tuple[Cached, list[tuple[float, float]]]:
        """The batch that the step is warmed up on, and the wall and CPU seconds of one or two, of which the first was cold.

        Raises:
            StopIteration: there is none.
            Raised: a sample raised.
        """
        batches = iter(make_traced_loader(data, LoaderConfig(), self._reading, on_error=Raised.of))
        first, took = None, list[tuple[float, float]]()
        while first is None or (len(took) == 1 and took[0][0] <= SECOND_LOOK_S):
            begun = time.monotonic()
            batch, fetch = next(batches)
            took.append((time.monotonic() - begun, fetch[4]))
            first = first or Cached(checked(batch), fetch[5])
        return first, took

    def _report(
        self, step: TrainingStep, first: Cached, took: list[tuple[float, float]], why_none: list[str]
    ) -> WarmupReport:
        """What the first batches tell of the workload, and what workers make of it."""
        shape, data, first_batch_s = BatchShape.of(first.batch), self._data, took[0][0]
        fetch_s, fetch_cpu_s = max(took, key=lambda each: each[1] / max(each[0], 1e-9))  # the one that waited less
        counts_batches = not data.is_batched and first.samples == 1 and samples_in(first.batch) is None
        alone = shape.on_accelerator
        repeats = data.is_iterable and not alone and workers_repeat_each_other(data, first_batch_s)
        told = {
            BATCHES_COUNTED: counts_batches,
            SLOW_BATCHES.format(seconds=fetch_s): fetch_s > SLOW_FETCH_S,
            REPEATED_SAMPLES: repeats,
            self._reading.note or "": self._reading.note is not None,
        }
        return WarmupReport(
            step=step.description,
            samples=first.samples,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            on_accelerator=alone,
            first_fetch_s=fetch_s,
            first_fetch_cpu_s=fetch_cpu_s,
            first_batch_s=first_batch_s,
            counts_batches=counts_batches,
            shardable=not repeats,
            same_in_workers=alone or not why_none,
            default_threads=torch.get_num_threads(),
            notes=(*step.notes, *(note for note, holds in told.items() if holds), *([] if alone else why_none)),
        )


def warm_up(step: TrainingStep, batch: Any, timeline: Timeline | None) -> None:
    """Run the step until it takes what it will take from now on."""
    now, took = time.monotonic, list[float]()
    if timeline is not None:
        timeline.open()
        now = timeline.now
    while not _is_warm(took):
        begun = now()
        step.run(batch)
        if timeline is not None:
            timeline.synchronize()
        took.append(now() - begun)


def _is_warm(took: list[float]) -> bool:
    """Whether steps have settled, or are so long that waiting for it costs more than it tells."""
    if len(took) < 2:
        return False
    if len(took) * min(took) > WARM_UP_S or len(took) >= MOST_WARM_UP_STEPS:
        return True
    return len(took) >= WARM_UP_STEPS and max(took[-2:]) <= SETTLED * min(took[-2:])
