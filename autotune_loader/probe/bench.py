"""A workload loaded and warmed up, ready to be burst: what the probe process and the inline probe have in common."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from autotune_loader.machine.facts import start_method
from autotune_loader.machine.gpus import Gpus
from autotune_loader.machine.inherited import file_positions, moved_files
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.handles import bound_to_process, held_by
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bad_samples import MOST_BAD, Order, bad_sample_of, for_bursts, raises_alone
from autotune_loader.probe.burst import run_burst, run_step_ceiling
from autotune_loader.probe.burst_loop import Announce, BatchShape
from autotune_loader.probe.device import Timeline, timeline_of
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.restarts import READ_ONCE, goes_on
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.probe.worker_checks import files_moved_by_a_worker, workers_repeat_each_other
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BadSample, Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# The first steps are slow (allocator, thread pools, cuDNN's choice of algorithms): that many, or that long, is enough.
WARM_UP_STEPS, WARM_UP_S = 3, 1.0
# A first batch that took no longer is looked at twice.
SECOND_LOOK_S = 0.5
# A batch that takes longer to fetch is measured with smaller ones, which take about SMALLER_FETCH_S: a burst needs several.
SLOW_FETCH_S, SMALLER_FETCH_S = 2.0, 0.5
# Normalisation over a batch needs two samples.
FEWEST_SAMPLES = 2
# On a device torch.compile compiles in the first step, may do so again in the second and records graphs in the third: it is
# warm when two steps in a row take the same time, and not before the second.
MOST_WARM_UP_STEPS, SETTLED = 10, 1.2
READS_BY_ITSELF = (
    "the dataset reads by a DataLoader of its own, which other workers cannot share, so none are tried (num_workers=0); the "
    "num_workers to try is the dataset's own"
)
SHARED_FILE = (
    "{dataset} reads from {file}, which was open before: forked workers would share its position, and training would get wrong "
    "samples without a word, so none are tried (num_workers=0); open it on first use in each worker, or in worker_init_fn"
)
BOUND = (
    "{path} is a {kind}, which works in the process that made it only, so no workers are tried (num_workers=0); make it on "
    "first use in each worker, or in worker_init_fn"
)
UNPICKLABLE_BATCH = (
    "a batch cannot be pickled ({fault}), so no worker could hand it over and none are tried (num_workers=0); tensors, "
    "numbers, and objects of classes at the top level of a module can be"
)
BATCHES_COUNTED = (
    "how many samples a batch has cannot be told: it is made by the dataset, and holds no tensor with a first dimension; "
    "every batch counts as one sample, so rates are batches/s"
)
SMALLER_BATCHES = (
    "a batch of {whole} samples takes about {whole_s:.0f} s to fetch in one process, so the bursts read batches of {size}; "
    "what a step on a whole batch takes was not measured"
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
    """Wall seconds that the very first batch took."""
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
    warm_up_s: float = 0.0
    """Wall seconds of the step's first runs: for a compiled one mostly the compiling."""
    device_uuid: str | None = None
    """CUDA's UUID of the device that the step runs on; None for a CPU."""
    notes: tuple[str, ...] = ()
    """What the user should know of the step, such as that nothing is trained."""
    bad_samples: tuple[BadSample, ...] = ()
    """Samples of the first batches that raised; they are left out from then on."""


def gpus_of(warmup: WarmupReport | None) -> Gpus | None:
    """The one GPU that a bench trains on, as its meter wants it; None for a CPU."""
    uuid = warmup.device_uuid if warmup is not None else None
    return None if uuid is None else _gpus(uuid)


@functools.lru_cache(maxsize=8)
def _gpus(uuid: str) -> Gpus:
    # Kept, since NVML counts how often it was started.
    return Gpus(cuda_uuids=[uuid])


class FetchTime(NamedTuple):
    """What fetching one batch in the main process takes, in seconds."""

    wall_s: float
    cpu_s: float


class Bench:
    """Runs bursts of one workload in this process.

    Args:
        data: gives the data side that workers inherit; the main process never fetches from it.
        private_data: gives a data side that the main process may fetch from, filled caches and open handles and all.
        training: model, step and optimizer, as training would begin with them.
        usable_cores: what CPU use is a share of.
    """

    def __init__(
        self,
        data: Callable[[], DataSide],
        private_data: Callable[[], DataSide],
        training: TrainingSide,
        usable_cores: float = 1.0,
    ) -> None:
        self._usable_cores = usable_cores
        self._data = data
        self._private_data = private_data
        self._training = training
        self._step: TrainingStep | None = None
        self._timeline: Timeline | None = None
        self._batch: Any = None
        self._samples = 0
        self._whole = 1
        """Samples of a batch in training."""
        self._at_most: int | None = None
        """Samples of a batch, where whole ones take too long."""
        self._order: Order | None = None
        self._bad_samples: dict[str, BadSample] = {}
        self._moved_files: list[str] = []
        """Files that were open before the first batch was read from them: workers would share their positions."""

    def prepare(self, announce: Announce = lambda phase: None) -> WarmupReport | Failure:
        """Fetch one batch in this process, build the step from it and warm the step up."""
        return self._without_bad_samples(lambda: self._prepare(announce), None)

    def burst(
        self, config: LoaderConfig, plan: BurstPlan, announce: Announce = lambda phase: None
    ) -> Measurement | Failure:
        """Train for a moment with `config`; a sample that raises is left out, and the burst run again.

        Raises:
            WorkloadError: it is the third one.
        """
        failure = self._warm_again()
        if failure is not None:
            return failure
        outcome = self._without_bad_samples(
            lambda: self._burst(config, plan, announce), self._private_data if config.num_workers else None
        )
        if isinstance(outcome, Failure):
            return outcome
        return replace(outcome, bad_samples=tuple(self._bad_samples.values()))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        """Step on one cached batch again and again, of another size where the plan asks for it."""
        assert self._step is not None, "prepare() comes first"
        batch, samples = self._batch, self._samples
        if plan.batch_size not in (None, samples):
            try:
                config = LoaderConfig(batch_size=plan.batch_size)
                data, _ = for_bursts(self._private_data(), config, self._bad_samples, None)
                batch, fetch = next(iter(make_traced_loader(data, config, seed=0)))
            except Exception as error:
                return failure_of(error, "first_batch")
            finally:
                forget_open_batch()
            samples = fetch[5]
        failure = self._warm_again()
        if failure is not None:
            return failure
        outcome = run_step_ceiling(batch, samples, self._step, consumer_threads, plan, self._timeline)
        return self._of_all_cores(outcome)

    def close(self) -> None:
        """Let go of model, optimizer and batch, and of the device memory that they took."""
        self._step, self._batch, self._training = None, None, TrainingSide()
        if self._timeline is not None:
            self._timeline.release()

    def _without_bad_samples(self, run: Callable[[], T | Failure], again: Callable[[], DataSide] | None) -> T | Failure:
        """What `run` returns once it fails by no sample.

        Args:
            run: a burst, or the first batch; it fills `self._order`.
            again: what this process may read a sample from, to see whether it raises here, too; None where it read it itself.
        """
        while True:
            self._order = None
            outcome = run()
            if not isinstance(outcome, Failure):
                return outcome
            bad = bad_sample_of(outcome)
            if bad is None or self._order is None or bad.name in self._bad_samples:
                return outcome
            keys = self._order.key_of(bad.name)
            if again is not None and not raises_alone(again().dataset, keys):
                advice = f"{bad.name} raises {bad.error} in a worker, and not when it is read again alone"
                return replace(outcome, message=advice, retryable=True)
            self._bad_samples[bad.name] = bad
            if len(self._bad_samples) >= MOST_BAD:
                first, *others = self._bad_samples.values()
                raise WorkloadError(
                    f"{first.name} raises {first.error}, and so do {' and '.join(each.name for each in others)}",
                    outcome.traceback or "",
                )

    def _prepare(self, announce: Announce) -> WarmupReport | Failure:
        phase: FailurePhase = "first_batch"
        try:
            announce(phase)
            private = self._private_data()
            positions = file_positions()
            sample_s = self._fetch_one(private)
            times = self._fetch_first(private, sample_s)
            self._moved_files = moved_files(positions)
            if goes_on(private.dataset, self._private_data):
                message = READ_ONCE.format(dataset=type(private.dataset).__name__)
                return Failure(kind="no_data", phase=phase, message=message)
            phase = "step"
            announce(phase)
            self._step = build_step(self._training, self._batch)
            self._timeline = timeline_of(self._step.device)
            begun = time.monotonic()
            step_s = warm_up(self._step, self._batch, self._timeline)
            warm_up_s = time.monotonic() - begun
        except StopIteration:
            return Failure(kind="no_data", phase=phase, message="the dataset delivered no batch")
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return failure_of(error, phase)
        finally:
            forget_open_batch()
        report = self._report_on(self._step, private, times)
        smaller = SMALLER_BATCHES.format(whole=self._whole, whole_s=sample_s * self._whole, size=self._at_most)
        slow = [smaller] if self._at_most is not None else []
        return replace(report, step_s=step_s, warm_up_s=warm_up_s, notes=(*report.notes, *slow))

    def _batches(self, data: DataSide, at_most: int | None) -> Iterator[Any]:
        named, self._order = for_bursts(data, LoaderConfig(), self._bad_samples, at_most)
        return iter(make_traced_loader(named, LoaderConfig(), seed=0))

    def _fetch_one(self, data: DataSide) -> float:
        """Seconds of a sample alone, which tells whether whole batches take too long; 0 where it is not looked at."""
        if data.batch_size == 1 or not data.is_batched or isinstance(data.dataset, Iterator):
            return 0.0
        batches, took = self._batches(data, 1), list[float]()
        while len(took) < 2:  # the first may have opened a file, or imported what decodes it
            begun = time.monotonic()
            try:
                next(batches)
            except StopIteration:
                break
            took.append(time.monotonic() - begun)
        return min(took, default=0.0)

    def _fetch_first(self, data: DataSide, sample_s: float) -> list[FetchTime]:
        """Fetch the batch that the step is warmed up on, and another where that takes no time: what they took."""
        self._whole = data.batch_size or (self._order.whole if self._order is not None else 1)
        if sample_s * self._whole > SLOW_FETCH_S:
            self._at_most = max(FEWEST_SAMPLES, int(SMALLER_FETCH_S / sample_s))
        batches, times = self._batches(data, self._at_most), list[FetchTime]()
        while not times or (len(times) < 2 and times[0].wall_s <= SECOND_LOOK_S):
            begun = time.monotonic()
            try:
                batch, fetch = next(batches)
            except Exception:
                if not times:
                    raise
                break  # the first batch was all there is, or a burst will tell what is wrong
            times.append(FetchTime(time.monotonic() - begun, fetch[4]))
            if len(times) == 1:
                self._batch, self._samples = batch, fetch[5]
        return times

    def _report_on(self, step: TrainingStep, private: DataSide, times: list[FetchTime]) -> WarmupReport:
        """What the first batches tell of the workload, and what workers make of it."""
        import torch

        shape = BatchShape.of(self._batch)
        data = self._data()
        counts_batches = not data.is_batched and self._samples == 1 and samples_in(self._batch) is None
        reads_by_itself = not shape.on_accelerator and (data.reads_by_itself or private.reads_by_itself)
        alone = shape.on_accelerator or reads_by_itself
        small = data if self._at_most is None or data.batch_size is None else replace(data, batch_size=self._at_most)
        repeats = data.is_iterable and not alone and workers_repeat_each_other(small, times[0].wall_s)
        why_none = (
            [] if alone else self._against_workers(data, times[0].wall_s, has_init=private.worker_init_fn is not None)
        )
        # A cold file or a busy machine is no habit.
        typical = max(times, key=lambda each: each.cpu_s / max(each.wall_s, 1e-9))
        return WarmupReport(
            step=step.description,
            samples=self._samples,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            on_accelerator=shape.on_accelerator,
            first_fetch_s=typical.wall_s,
            first_fetch_cpu_s=typical.cpu_s,
            first_batch_s=times[0].wall_s,
            counts_batches=counts_batches,
            reads_by_itself=reads_by_itself,
            shardable=not repeats,
            same_in_workers=not why_none,
            default_threads=torch.get_num_threads(),
            device_uuid=_uuid_of(step.device),
            notes=(
                *step.notes,
                *_clock_notes(step.device, self._timeline),
                *([BATCHES_COUNTED] if counts_batches else []),
                *([READS_BY_ITSELF] if reads_by_itself else []),
                *why_none,
            ),
            bad_samples=tuple(self._bad_samples.values()),
        )

    def _against_workers(self, data: DataSide, first_fetch_s: float, *, has_init: bool) -> list[str]:
        """Why workers would get other samples, or none; empty where nothing is known against them."""
        dataset, found = type(data.dataset).__qualname__, list[str]()
        if start_method() == "fork":
            files = self._moved_files
            if files and has_init:  # which may open them anew
                files = files_moved_by_a_worker(data, files, first_fetch_s)
            found += [SHARED_FILE.format(dataset=dataset, file=file) for file in files[:1]]
            held = None if has_init else held_by("dataset", data.dataset, bound_to_process)
            found += [BOUND.format(path=held[0], kind=type(held[1]).__name__)] if held is not None else []
        fault = why_not_pickled(self._batch)
        found += [UNPICKLABLE_BATCH.format(fault=fault)] if fault is not None else []
        return found[:1]

    def _burst(self, config: LoaderConfig, plan: BurstPlan, announce: Announce) -> Measurement | Failure:
        assert self._step is not None, "prepare() comes first"
        data = (self._data if config.num_workers else self._private_data)()
        named, self._order = for_bursts(data, config, self._bad_samples, self._at_most)
        outcome = run_burst(named, self._step, config, plan, announce, self._timeline)
        return self._of_all_cores(outcome)

    def _of_all_cores(self, outcome: Measurement | Failure) -> Measurement | Failure:
        """With the cores that were busy as a share of those that are usable."""
        if isinstance(outcome, Failure) or outcome.cpu_share is None:
            return outcome
        return replace(outcome, cpu_share=outcome.cpu_share / self._usable_cores)

    def _warm_again(self) -> Failure | None:
        """After memory of the device was given back: a step outside of any window asks the driver for it."""
        if self._timeline is None or not self._timeline.is_cold:
            return None
        try:
            self._step.run(self._batch)  # type: ignore[union-attr]
            self._timeline.synchronize()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return failure_of(error, "step")
        self._timeline.is_cold = False
        return None


def warm_up(step: TrainingStep, batch: Any, timeline: Timeline | None) -> float:
    """Run the step until it takes what it will take from now on; the seconds of the quickest."""
    if timeline is not None:
        return _warm_up_device(step, batch, timeline)
    took: list[float] = []
    while len(took) < WARM_UP_STEPS and sum(took) <= WARM_UP_S:
        begun = time.monotonic()
        step.run(batch)
        took.append(time.monotonic() - begun)
    return min(took)


def _warm_up_device(step: TrainingStep, batch: Any, timeline: Timeline) -> float:
    timeline.open()
    took: list[float] = []
    while len(took) < MOST_WARM_UP_STEPS and not _is_warm(took):
        begun = timeline.now()
        step.run(batch)
        timeline.synchronize()
        took.append(timeline.now() - begun)
    return min(took)


def _is_warm(took: list[float]) -> bool:
    """Whether steps on a device have settled, or are so long that waiting for it costs more than it tells."""
    if len(took) < 2:
        return False
    if len(took) * min(took) > WARM_UP_S:
        return True
    return len(took) >= WARM_UP_STEPS and max(took[-2:]) <= SETTLED * min(took[-2:])


def _clock_notes(device: torch.device, timeline: Timeline | None) -> list[str]:
    if device.type == "cpu" or timeline is not None:
        return []
    return [
        f"{device} has no events in this torch, so its steps are timed by the host's clock, which sees them end too early; "
        "a train_step that waits for the device (loss.item(), say) is timed right"
    ]


def _uuid_of(device: torch.device) -> str | None:
    import torch

    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)
