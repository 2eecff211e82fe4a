"""A workload loaded and warmed up, ready to be burst: what the probe process and the inline probe have in common."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bad_samples import BadSamples, SampleError, for_bursts, good
from autotune_loader.probe.burst import Cached, run_burst
from autotune_loader.probe.burst_loop import Announce, BatchShape
from autotune_loader.probe.device import Timeline, timeline_of
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.first_batches import FirstBatch, fetch_first
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.probe.worker_checks import READ_ONCE, goes_on, why_no_workers, workers_repeat_each_other
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

# The first steps are slow (allocator, thread pools, cuDNN's choice of algorithms): that many, or that long, is enough.
WARM_UP_STEPS, WARM_UP_S = 3, 1.0
# On a device torch.compile compiles in the first step, may do so again in the second and records graphs in the third: it is
# warm when two steps in a row take the same time, and not before the second.
MOST_WARM_UP_STEPS, SETTLED = 10, 1.2
READS_BY_ITSELF = (
    "the dataset reads by a DataLoader of its own, which other workers cannot share, so none are tried (num_workers=0); the "
    "num_workers to try is the dataset's own"
)
BATCHES_COUNTED = (
    "how many samples a batch has cannot be told: it is made by the dataset, and holds no tensor with a first dimension; "
    "every batch counts as one sample, so rates are batches/s"
)
SMALLER_BATCHES = (
    "a batch of {whole} samples takes about {whole_s:.0f} s to fetch in one process, so the bursts read batches of {size}; "
    "what a step on a whole batch takes was not measured"
)
NO_EVENTS = (
    "{device} has no events in this torch, so its steps are timed by the host's clock, which sees them end too early; "
    "a train_step that waits for the device (loss.item(), say) is timed right"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """What a bench knows once it has seen one batch and run the step on it."""

    step: str
    """What is done with a batch, in words."""
    samples: int
    """Samples in the first batch."""
    batch_bytes: int
    batch_tensors: int
    on_accelerator: bool
    """Whether the dataset itself yields tensors on an accelerator, which workers and pinning cannot handle."""
    first_fetch_s: float
    """Wall seconds that a first batch takes, fetched in the main process."""
    first_fetch_cpu_s: float
    step_s: float = 0.0
    """Wall seconds of one step on that batch, the quickest while it was warmed up; about 0 where nothing is trained."""
    first_batch_s: float = 0.0
    """Wall seconds that the very first batch of a burst's size took."""
    burst_batch_size: int | None = None
    """Samples of a batch in bursts, where whole ones take too long; what is said of a batch here is of whole ones."""
    counts_batches: bool = False
    """Whether a batch counts as one sample, because nothing tells how many it has."""
    reads_by_itself: bool = False
    """Whether the dataset reads by a loader of its own, which the workers of another cannot share."""
    shardable: bool = True
    """Whether several workers share the samples out; False for an IterableDataset whose workers repeat each other."""
    same_in_workers: bool = True
    """Whether workers read the samples that a process alone reads; False where they share an open file, say."""
    default_threads: int
    """Intra-op threads of the process before anything was tuned."""
    notes: tuple[str, ...] = ()
    """What the user should know of the step, such as that nothing is trained."""
    bad_samples: tuple[BadSample, ...] = ()
    """Samples of the first batches that raised; they are left out from then on."""


class Bench:
    """Runs bursts of one workload in this process.

    Args:
        data: gives the data side that workers inherit; the main process never fetches from it.
        private_data: gives a data side that the main process may fetch from, filled caches and open handles and all.
        training: model, step and optimizer, as training would begin with them.
    """

    def __init__(
        self, data: Callable[[], DataSide], private_data: Callable[[], DataSide], training: TrainingSide
    ) -> None:
        self._data = data
        self._private_data = private_data
        self._training = training
        self._bad = BadSamples()
        self._read: tuple[int, Reading] | None = None
        self._first: FirstBatch | None = None
        self._step: TrainingStep | None = None
        self._timeline: Timeline | None = None

    def prepare(self, announce: Announce = lambda phase: None) -> WarmupReport | Failure:
        """Fetch one batch in this process, build the step from it and warm the step up.

        Raises:
            WorkloadError: so many samples raise that training would hardly begin.
        """
        return self._bad.gone_without(lambda: self._prepare(announce), None)

    def burst(
        self, config: LoaderConfig, plan: BurstPlan, announce: Announce = lambda phase: None
    ) -> Measurement | Failure:
        """Train for a moment with `config`; a sample that raises is left out, and the burst run again.

        Raises:
            WorkloadError: it is the third one.
        """
        step, has_workers = self._step, config.num_workers > 0
        assert step is not None, "prepare() comes first"

        def run() -> Measurement | Failure:
            data = self._for_bursts((self._data if has_workers else self._private_data)())
            return run_burst(data, step, config, plan, announce, self._timeline, self._bad.by_name, self._reading())

        if (failure := self._warm_again()) is not None:
            return failure
        return self._bad.gone_without(run, self._private_data if has_workers else None)

    def step_ceiling(
        self, config: LoaderConfig, plan: BurstPlan, announce: Announce = lambda phase: None
    ) -> Measurement | Failure:
        """Step on the first batch again and again, or on one of another size."""
        first, step = self._first, self._step
        assert first is not None, "prepare() comes first"
        assert step is not None
        cached = Cached(first.batch, first.samples)
        if plan.batch_size not in (None, first.samples):
            try:
                batch, fetch = next(self._batches(self._private_data(), plan.batch_size))
                cached = Cached(batch, fetch[5])
            except Exception as error:
                return failure_of(error, "first_batch")
            finally:
                forget_open_batch()
        return self._warm_again() or run_burst(cached, step, config, plan, announce, self._timeline)

    def close(self) -> None:
        """Let go of model, optimizer and batch, and of the device memory that they took."""
        self._step, self._first, self._training = None, None, TrainingSide()
        if self._timeline is not None:
            self._timeline.release()

    def _prepare(self, announce: Announce) -> WarmupReport | Failure:
        phase: FailurePhase = "first_batch"
        try:
            announce(phase)
            private = self._private_data()
            if goes_on(private.dataset):
                message = READ_ONCE.format(dataset=type(private.dataset).__name__)
                return Failure(kind="no_data", phase=phase, message=message)
            first = self._first = fetch_first(private, functools.partial(self._batches, private))
            phase = "step"
            announce(phase)
            self._step = build_step(self._training, first.batch)
            self._timeline = timeline_of(self._step.device)
            step_s = warm_up(self._step, first.batch, self._timeline)
        except StopIteration:
            if self._bad.ends_run is not None:  # nothing is left without them
                raise self._bad.ends_run from None
            return Failure(kind="no_data", phase=phase, message="the dataset delivered no batch")
        except SampleError:
            raise
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return failure_of(error, phase)
        finally:
            forget_open_batch()
        return self._report_on(self._step, first, private, step_s * first.share_of_whole)

    def _batches(self, data: DataSide, size: int | None) -> Iterator[Any]:
        loader = make_traced_loader(self._for_bursts(data), LoaderConfig(batch_size=size), self._reading())
        yield from ((good(batch), fetch) for batch, fetch in loader)

    def _reading(self) -> Reading:
        """Of the run; begun anew where a sample was left out."""
        left_out = len(self._bad.left_out)
        if self._read is None or self._read[0] != left_out:
            self._read = left_out, Reading(self._for_bursts(self._data()))
        return self._read[1]

    def _for_bursts(self, data: DataSide) -> DataSide:
        at_most = self._first.at_most if self._first is not None else None
        return for_bursts(replace(data, batch_size=at_most or data.batch_size), self._bad.left_out)

    def _report_on(self, step: TrainingStep, first: FirstBatch, private: DataSide, step_s: float) -> WarmupReport:
        """What the first batches tell of the workload, and what workers make of it."""
        shape, data, more = BatchShape.of(first.batch), self._data(), first.share_of_whole
        counts_batches = not data.is_batched and first.samples == 1 and samples_in(first.batch) is None
        reads_by_itself = not shape.on_accelerator and (data.reads_by_itself or private.reads_by_itself)
        alone = shape.on_accelerator or reads_by_itself
        small = replace(data, batch_size=first.at_most or data.batch_size)
        repeats = data.is_iterable and not alone and workers_repeat_each_other(small, first.first_s)
        why_none = [] if alone else why_no_workers(small, first)
        smaller = SMALLER_BATCHES.format(whole=data.batch_size, whole_s=first.wall_s * more, size=first.at_most)
        told = {
            NO_EVENTS.format(device=step.device): step.device.type != "cpu" and self._timeline is None,
            BATCHES_COUNTED: counts_batches,
            READS_BY_ITSELF: reads_by_itself,
            smaller: first.at_most is not None,
        }
        return WarmupReport(
            step=step.description,
            samples=round(first.samples * more),
            batch_bytes=round(shape.bytes * more),
            batch_tensors=shape.tensors,
            on_accelerator=shape.on_accelerator,
            first_fetch_s=first.wall_s * more,
            first_fetch_cpu_s=first.cpu_s * more,
            step_s=step_s,
            first_batch_s=first.first_s,
            burst_batch_size=first.at_most,
            counts_batches=counts_batches,
            reads_by_itself=reads_by_itself,
            shardable=not repeats,
            same_in_workers=not why_none,
            default_threads=torch.get_num_threads(),
            notes=(*step.notes, *(note for note, holds in told.items() if holds), *why_none),
            bad_samples=tuple(self._bad.by_name.values()),
        )

    def _warm_again(self) -> Failure | None:
        """After memory of the device was given back: a step outside of any window asks the driver for it."""
        if self._timeline is None or not self._timeline.is_cold:
            return None
        assert self._step is not None
        assert self._first is not None
        try:
            self._step.run(self._first.batch)
            self._timeline.synchronize()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return failure_of(error, "step")
        self._timeline.is_cold = False
        return None


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
