"""A workload loaded and warmed up, ready to be burst: what the probe process and the inline probe have in common."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune_loader.machine.facts import start_method
from autotune_loader.machine.gpus import Gpus
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.look import look, moved, positions, shown
from autotune_loader.pipeline.trace_log import Fetch, unread_s_of
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.burst import run_burst, run_step_ceiling
from autotune_loader.probe.burst_loop import Announce, BatchShape
from autotune_loader.probe.device import Timeline, timeline_of
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.restarts import READ_ONCE, goes_on
from autotune_loader.probe.samples import MOST_NOTED, BurstStep, Notebook, Raised, for_bursts, raises_alone
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.probe.worker_checks import workers_read_otherwise, workers_repeat_each_other
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

if TYPE_CHECKING:
    import torch

# The first steps are slow (allocator, thread pools, cuDNN's choice of algorithms): that many, or that long, is enough.
WARM_UP_STEPS, WARM_UP_S = 3, 1.0
# Where the first batch took no longer, no batch is slow enough to be cut short, and samples are not timed one by one.
PACED_FETCH_S = 0.25
# A first batch that took no longer is looked at twice.
SECOND_LOOK_S = 0.5
# On a device torch.compile compiles in the first step, may do so again in the second and records graphs in the third: it is
# warm when two steps in a row take the same time, and not before the second.
MOST_WARM_UP_STEPS, SETTLED = 10, 1.2
READS_BY_ITSELF = (
    "the dataset reads by a DataLoader of its own, which other workers cannot share, so none are tried (num_workers=0); the "
    "num_workers to try is the dataset's own"
)
OTHER_SAMPLES = (
    "{dataset}: two workers read other samples than one process does, at the same indices, so none are tried (num_workers=0). "
    "Most often they share a file or database handle that was opened before they were started (open(), h5py, LMDB); open it on "
    "first use in each worker, or in worker_init_fn"
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
    """Wall seconds until it was there: less, where its slow fetch was cut short."""
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
    """Samples of the first batches that raised, and had others in their place."""


def gpus_of(warmup: WarmupReport | None) -> Gpus | None:
    """The one GPU that a bench trains on, as its meter wants it; None for a CPU."""
    uuid = warmup.device_uuid if warmup is not None else None
    return None if uuid is None else _gpus(uuid)


@functools.lru_cache(maxsize=8)
def _gpus(uuid: str) -> Gpus:
    # Kept, since NVML counts how often it was started.
    return Gpus(cuda_uuids=[uuid])


class FetchTime(NamedTuple):
    """What fetching one batch in the main process takes."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, fetch: Fetch, took_s: float) -> FetchTime:
        """All of it, where it took so long until it was there, or was cut short."""
        whole_s = took_s + unread_s_of(fetch)
        return cls(whole_s, fetch[4] * whole_s / max(took_s, 1e-9))


def _one_or_two(first: FetchTime, batches: Iterator[Any]) -> list[FetchTime]:
    """The first fetch and, where that was not too slow for another, the second."""
    if first.wall_s > SECOND_LOOK_S:
        return [first]
    begun = time.monotonic()
    try:
        _, fetch = next(batches)
    except Exception:  # the first batch was all there is, or a burst will tell what is wrong
        return [first]
    return [first, FetchTime.of(fetch, time.monotonic() - begun)]


class Bench:
    """Runs bursts of one workload in this process.

    Args:
        data: gives the data side that workers inherit; the main process never fetches from it.
        private_data: gives a data side that the main process may fetch from, filled caches and open handles and all.
        training: makes model, step and optimizer, as training would begin with them.
        scratch: a folder that is removed in the end; None makes one.
    """

    def __init__(
        self,
        data: Callable[[], DataSide],
        private_data: Callable[[], DataSide],
        training: Callable[[], TrainingSide],
        scratch: str | None = None,
    ) -> None:
        self._data = data
        self._private_data = private_data
        self._fresh_training = training
        self._training = training()
        self._step: TrainingStep | None = None
        self._timeline: Timeline | None = None
        self._batch: Any = None
        self._samples = 0
        folder = scratch or tempfile.mkdtemp(prefix="autotune-loader-")
        self._forget_scratch = None if scratch else weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._notebook = Notebook(folder)
        self._is_paced = True
        self._moved_file: str | None = None
        """Files that were open before the first batch was read from them: workers would share their positions."""
        self._bad_samples: dict[str, BadSample] = {}
        self._raised_alone: set[str] = set()
        """Classes of what was raised for samples in this process, too."""

    def prepare(self, announce: Announce = lambda phase: None) -> WarmupReport | Failure:
        """Fetch one batch in this process, build the step from it and warm the step up."""
        phase: FailurePhase = "first_batch"
        try:
            announce(phase)
            private = self._private_data()
            if goes_on(private.dataset):
                message = READ_ONCE.format(dataset=type(private.dataset).__name__)
                return Failure(kind="no_data", phase=phase, message=message)
            places = positions()
            batches = iter(make_traced_loader(self._for_bursts(private), LoaderConfig(), seed=0))
            first_batch_s, times = self._fetch_first(private, batches)
            self._moved_file = moved(places, positions())
            self._judge(self._notebook.taken())
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
        return replace(report, step_s=step_s, first_batch_s=first_batch_s, warm_up_s=warm_up_s)

    def _fetch_first(self, private: DataSide, batches: Iterator[Any]) -> tuple[float, list[FetchTime]]:
        """Fetch the batch that the step is warmed up on: seconds until it was there, and what it and the next one took."""
        begun = time.monotonic()
        self._batch, fetch = next(batches)
        self._samples = fetch[5]
        first_batch_s = time.monotonic() - begun
        times = _one_or_two(FetchTime.of(fetch, first_batch_s), batches)
        # Calls that take as long for a few samples as for all are made whole.
        is_divisible = not hasattr(private.dataset, "__getitems__") or unread_s_of(fetch) > 0
        self._is_paced = times[0].wall_s > PACED_FETCH_S and is_divisible
        return first_batch_s, times

    def _report_on(self, step: TrainingStep, private: DataSide, times: list[FetchTime]) -> WarmupReport:
        """What the first batches tell of the workload, and what workers make of it."""
        import torch

        shape = BatchShape.of(self._batch)
        data = self._data()
        counts_batches = not data.is_batched and self._samples == 1 and samples_in(self._batch) is None
        reads_by_itself = not shape.on_accelerator and (data.reads_by_itself or private.reads_by_itself)
        alone = shape.on_accelerator or reads_by_itself
        repeats = data.is_iterable and not alone and workers_repeat_each_other(data, times[0].wall_s)
        # The first fetch may have opened a file, or imported what decodes it.
        sample_s = min(each.wall_s for each in times) / max(self._samples, 1)
        why_none = [] if alone else self._against_workers(data)
        if not alone and not why_none and workers_read_otherwise(data, private, sample_s):
            why_none = [OTHER_SAMPLES.format(dataset=type(data.dataset).__qualname__)]
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

    def _against_workers(self, data: DataSide) -> list[str]:
        """Why workers would get other samples, or none, as far as that is known without any; empty where nothing is."""
        dataset, found = type(data.dataset).__qualname__, list[str]()
        if start_method() == "fork":
            if self._moved_file is not None:
                found.append(SHARED_FILE.format(dataset=dataset, file=self._moved_file))
            bound = look({"dataset": data.dataset}).bound
            found += [BOUND.format(path=shown(path), words=words) for path, words in bound[:1]]
        fault = why_not_pickled(self._batch)
        found += [UNPICKLABLE_BATCH.format(fault=fault)] if fault is not None else []
        return found[:1]

    def burst(
        self, config: LoaderConfig, plan: BurstPlan, announce: Announce = lambda phase: None
    ) -> Measurement | Failure:
        assert self._step is not None, "prepare() comes first"
        failure = self._warm_again()
        if failure is not None:
            return failure
        data, step = (self._data if config.num_workers else self._private_data)(), self._step
        loaded = self._for_bursts(data, is_paced=self._is_paced and not plan.whole_epochs)
        step = replace(step, train=BurstStep(step, self._batch, self._notebook))
        outcome = run_burst(loaded, step, config, plan, announce, self._timeline)
        raised = self._notebook.taken()
        if isinstance(outcome, Failure):
            return outcome
        failure = self._judge(raised, self._private_data if config.num_workers else None)
        return failure or replace(outcome, bad_samples=tuple(self._bad_samples.values()))

    def _for_bursts(self, data: DataSide, *, is_paced: bool = True) -> DataSide:
        return for_bursts(data, self._notebook, is_paced=is_paced)

    def _judge(self, raised: list[Raised], again: Callable[[], DataSide] | None = None) -> Failure | None:
        """Remember the samples that raised; a failure where only workers see them raise.

        Args:
            raised: what was noted.
            again: what this process may read the samples from again; None where it was the one that read them.
        """
        for each in raised:
            if each.kind not in self._raised_alone:
                if again is not None and not raises_alone(again(), each):
                    return Failure(
                        kind="user_exception",
                        phase="batches",
                        message=f"{each.name} raises {each.error} in a worker, and not when it is read again alone",
                        retryable=True,
                    )
                self._raised_alone.add(each.kind)
            if len(self._bad_samples) < MOST_NOTED:
                self._bad_samples.setdefault(each.name, each.sample)
        return None

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        assert self._step is not None, "prepare() comes first"
        batch, samples = self._batch, self._samples
        if plan.batch_size not in (None, samples):
            try:
                data = self._for_bursts(self._private_data())
                loader = make_traced_loader(data, LoaderConfig(batch_size=plan.batch_size), seed=0)
                batch, fetch = next(iter(loader))
            except Exception as error:
                return failure_of(error, "first_batch")
            finally:
                forget_open_batch()
            samples = fetch[5]
        failure = self._warm_again()
        if failure is not None:
            return failure
        return run_step_ceiling(batch, samples, self._step, consumer_threads, plan, self._timeline)

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

    def close(self) -> None:
        """Let go of model, optimizer and batch, and of the device memory that they took."""
        self._step, self._batch, self._training = None, None, TrainingSide()
        self._fresh_training = TrainingSide
        if self._forget_scratch is not None:
            self._forget_scratch()
        if self._timeline is not None:
            self._timeline.release()


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
