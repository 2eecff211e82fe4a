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
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.look import look, moved, positions, shown
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bad_samples import MOST_BAD, SampleError, for_bursts
from autotune_loader.probe.burst import run_burst, run_step_ceiling
from autotune_loader.probe.burst_loop import Announce, BatchShape
from autotune_loader.probe.device import Timeline, timeline_of
from autotune_loader.probe.failures import failure_of, is_of_dataset, user_traceback, with_advice
from autotune_loader.probe.restarts import READ_ONCE, goes_on
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.probe.worker_checks import file_moved_by_a_worker, workers_repeat_each_other
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
# A batch that takes longer to fetch is measured with smaller ones, of about SMALLER_FETCH_S: a burst needs several.
SLOW_FETCH_S, SMALLER_FETCH_S = 2.0, 0.5
# Normalisation over a batch needs two samples.
FEWEST_SAMPLES = 2
# Of a dataset that fetches many at once, so many tell what each adds to a call.
FEW_SAMPLES = 3
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
    "{path} is {words}, which works in the process that made it only, so no workers are tried (num_workers=0); make it on "
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
    """

    def __init__(
        self, data: Callable[[], DataSide], private_data: Callable[[], DataSide], training: TrainingSide
    ) -> None:
        self._data = data
        self._private_data = private_data
        self._training = training
        self._step: TrainingStep | None = None
        self._timeline: Timeline | None = None
        self._batch: Any = None
        self._samples = 0
        self._at_most: int | None = None
        """Samples of a batch, where whole ones take too long."""
        self._moved_file: str | None = None
        """One that was open before the first batch was read from it: workers would share its position."""
        self._bad_samples: dict[str, BadSample] = {}
        self._without: set[str] = set()
        """Keys of the samples that are left out, as they are written."""
        self._ends_run: WorkloadError | None = None
        """What is raised once too many samples raise."""

    def prepare(self, announce: Announce = lambda phase: None) -> WarmupReport | Failure:
        """Fetch one batch in this process, build the step from it and warm the step up.

        Raises:
            WorkloadError: so many samples raise that training would hardly begin.
        """
        return self._without_bad_samples(lambda: self._prepare(announce), None)

    def burst(
        self, config: LoaderConfig, plan: BurstPlan, announce: Announce = lambda phase: None
    ) -> Measurement | Failure:
        """Train for a moment with `config`; a sample that raises is left out, and the burst run again.

        Raises:
            WorkloadError: it is the third one.
        """
        assert self._step is not None, "prepare() comes first"
        failure = self._warm_again()
        if failure is not None:
            return failure
        step, has_workers = self._step, config.num_workers > 0

        def run() -> Measurement | Failure:
            data = (self._data if has_workers else self._private_data)()
            return run_burst(self._for_bursts(data), step, config, plan, announce, self._timeline)

        outcome = self._without_bad_samples(run, self._private_data if has_workers else None)
        if isinstance(outcome, Failure):
            return outcome
        for bad in outcome.bad_samples:
            self._bad_samples.setdefault(bad.name, bad)
        return replace(outcome, bad_samples=tuple(self._bad_samples.values()))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        assert self._step is not None, "prepare() comes first"
        batch, samples = self._batch, self._samples
        if plan.batch_size not in (None, samples):
            try:
                batch, fetch = next(self._batches(self._private_data(), plan.batch_size))
            except Exception as error:
                return failure_of(error, "first_batch")
            finally:
                forget_open_batch()
            samples = fetch[5]
        failure = self._warm_again()
        if failure is not None:
            return failure
        return run_step_ceiling(batch, samples, self._step, consumer_threads, plan, self._timeline)

    def close(self) -> None:
        """Let go of model, optimizer and batch, and of the device memory that they took."""
        self._step, self._batch, self._training = None, None, TrainingSide()
        if self._timeline is not None:
            self._timeline.release()

    def _without_bad_samples(self, run: Callable[[], T | Failure], again: Callable[[], DataSide] | None) -> T | Failure:
        """What `run` returns once no sample raises in it.

        Args:
            run: a burst, or the first batch.
            again: what this process may read a sample from, to see whether it raises here, too; None where it read it itself.
        """
        while True:
            try:
                return run()
            except SampleError as error:
                traceback.clear_frames(error.__traceback__)
                failure = self._leave_out(error, again)
            if failure is not None:
                return failure

    def _leave_out(self, error: SampleError, again: Callable[[], DataSide] | None) -> Failure | None:
        """Go without a sample from now on; a failure where it is not the sample's fault, or cannot be left out."""
        bad = error.sample
        failure = replace(failure_of(error, "batches"), traceback=user_traceback(error.__cause__ or error))
        if bad.name in self._bad_samples:
            return failure
        if again is not None and not error.raises_in(again()):
            message = f"{bad.name} raises {bad.error} in a worker, and not when it is read again alone"
            return replace(failure, message=message, retryable=True)
        self._bad_samples[bad.name] = bad
        self._without |= error.left_out
        self._ends_run = WorkloadError(with_advice(self._told_of_bad_samples(), error), failure.traceback or "")
        if len(self._bad_samples) >= MOST_BAD:
            raise self._ends_run from None  # its text has all, without secrets
        return None

    def _told_of_bad_samples(self) -> str:
        first, *others = self._bad_samples.values()
        also = f", and so do {' and '.join(each.name for each in others)}" if others else ""
        return f"{first.name} raises {first.error}{also}"

    def _prepare(self, announce: Announce) -> WarmupReport | Failure:
        phase: FailurePhase = "first_batch"
        try:
            announce(phase)
            private = self._private_data()
            if goes_on(private.dataset):
                message = READ_ONCE.format(dataset=type(private.dataset).__name__)
                return Failure(kind="no_data", phase=phase, message=message)
            places = positions()
            times = self._fetch_first(private)
            self._moved_file = moved(places, positions())
            phase = "step"
            announce(phase)
            self._step = build_step(self._training, self._batch)
            self._timeline = timeline_of(self._step.device)
            begun = time.monotonic()
            step_s = warm_up(self._step, self._batch, self._timeline)
            warm_up_s = time.monotonic() - begun
        except StopIteration:
            if self._ends_run is not None:  # nothing is left without them
                raise self._ends_run from None
            return Failure(kind="no_data", phase=phase, message="the dataset delivered no batch")
        except SampleError as error:
            if is_of_dataset(error):
                raise
            return failure_of(error, phase)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return failure_of(error, phase)
        finally:
            forget_open_batch()
        report = self._report_on(self._step, private, times)
        return replace(report, step_s=step_s * self._share_of_whole(private), warm_up_s=warm_up_s)

    def _fetch_first(self, data: DataSide) -> list[FetchTime]:
        """Fetch the batch that the step is warmed up on, and another where that takes no time: what they took."""
        if not data.is_iterable:
            self._at_most = self._smaller(data, self._sample_s(data))
        times = self._fetch_two(data)
        if data.is_iterable and not isinstance(data.dataset, Iterator):  # of a stream nobody reads a sample alone
            self._at_most = self._smaller(data, times[0].wall_s / max(self._samples, 1))
            times = times if self._at_most is None else self._fetch_two(data)
        return times

    def _smaller(self, data: DataSide, sample_s: float) -> int | None:
        """Samples of a batch in bursts, if each sample takes so long; None for whole batches."""
        if data.batch_size is None or sample_s * data.batch_size <= SLOW_FETCH_S:
            return None
        size = max(FEWEST_SAMPLES, int(SMALLER_FETCH_S / sample_s))
        return size if size < data.batch_size else None

    def _sample_s(self, data: DataSide) -> float:
        """Seconds that each sample adds to a batch, where batches might be too slow; else 0."""
        whole = data.batch_size or 1
        if whole <= FEWEST_SAMPLES:
            return 0.0
        alone = self._batches(data, 1)
        first_s = _seconds_of(alone)
        if first_s * whole <= SLOW_FETCH_S:
            return 0.0
        warm_s = min(first_s, _seconds_of(alone))  # the first may have opened a file, or imported what decodes it
        if not hasattr(data.dataset, "__getitems__"):
            return warm_s
        return max(0.0, _seconds_of(self._batches(data, FEW_SAMPLES)) - warm_s) / (FEW_SAMPLES - 1)

    def _fetch_two(self, data: DataSide) -> list[FetchTime]:
        batches, times = self._batches(data), list[FetchTime]()
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

    def _batches(self, data: DataSide, size: int | None = None) -> Iterator[Any]:
        return iter(make_traced_loader(self._for_bursts(data), LoaderConfig(batch_size=size), seed=0))

    def _for_bursts(self, data: DataSide) -> DataSide:
        return for_bursts(replace(data, batch_size=self._at_most or data.batch_size), self._without)

    def _share_of_whole(self, data: DataSide) -> float:
        """How much more than a burst's batch a batch of training is."""
        return (data.batch_size or 1) / self._at_most if self._at_most else 1.0

    def _report_on(self, step: TrainingStep, private: DataSide, times: list[FetchTime]) -> WarmupReport:
        """What the first batches tell of the workload, and what workers make of it."""
        import torch

        shape = BatchShape.of(self._batch)
        data = self._data()
        counts_batches = not data.is_batched and self._samples == 1 and samples_in(self._batch) is None
        reads_by_itself = not shape.on_accelerator and (data.reads_by_itself or private.reads_by_itself)
        alone = shape.on_accelerator or reads_by_itself
        small = replace(data, batch_size=self._at_most or data.batch_size)
        repeats = data.is_iterable and not alone and workers_repeat_each_other(small, times[0].wall_s)
        why_none = [] if alone else self._against_workers(small, private, times[0].wall_s)
        # A cold file or a busy machine is no habit.
        typical = max(times, key=lambda each: each.cpu_s / max(each.wall_s, 1e-9))
        more = self._share_of_whole(data)
        smaller = SMALLER_BATCHES.format(whole=data.batch_size, whole_s=typical.wall_s * more, size=self._at_most)
        return WarmupReport(
            step=step.description,
            samples=round(self._samples * more),
            batch_bytes=round(shape.bytes * more),
            batch_tensors=shape.tensors,
            on_accelerator=shape.on_accelerator,
            first_fetch_s=typical.wall_s * more,
            first_fetch_cpu_s=typical.cpu_s * more,
            first_batch_s=times[0].wall_s,
            burst_batch_size=self._at_most,
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
                *([smaller] if self._at_most else []),
                *why_none,
            ),
            bad_samples=tuple(self._bad_samples.values()),
        )

    def _against_workers(self, data: DataSide, private: DataSide, first_fetch_s: float) -> list[str]:
        """Why workers would get other samples, or none; empty where nothing is known against them."""
        dataset, found = type(data.dataset).__qualname__, list[str]()
        if start_method() == "fork":
            file = self._moved_file
            if file is not None and private.worker_init_fn is not None:  # which may open it anew
                file = file_moved_by_a_worker(data, file, first_fetch_s)
            found += [] if file is None else [SHARED_FILE.format(dataset=dataset, file=file)]
            bound = look({"dataset": data.dataset}).bound
            found += [BOUND.format(path=shown(path), words=words) for path, words in bound[:1]]
        fault = why_not_pickled(self._batch)
        found += [UNPICKLABLE_BATCH.format(fault=fault)] if fault is not None else []
        return found[:1]

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


def _seconds_of(batches: Iterator[Any]) -> float:
    """What the next batch takes."""
    begun = time.monotonic()
    next(batches, None)
    return time.monotonic() - begun


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
