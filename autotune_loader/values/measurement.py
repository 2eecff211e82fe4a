"""One burst: how it is to be run, what it measured or how it failed, and the configuration that it is a trial of.

Times are seconds, sizes are bytes, shares lie between 0 and 1. `None` means "not measured"; zero is a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval, mean_interval
from autotune_loader.values.trace import BatchTrace, StageSamples

FailureKind = Literal[
    "user_exception",  # dataset, collate, worker_init_fn, model or step raised
    "out_of_memory",  # an allocation failed on the host
    "device_memory",  # an allocation failed on the accelerator
    "oom_killed",  # the kernel or the container killed a process (SIGKILL)
    "memory_guard",  # the tuner stopped the burst before the OOM killer would
    "shared_memory",  # /dev/shm is full or a segment could not be written (bus error included)
    "descriptors",  # too many open files
    "pickling",  # the workload does not survive the start method
    "deadline",  # no answer in time: a hang
    "crashed",  # a process died otherwise (segfault, exit in user code)
    "infeasible",  # vetoed by arithmetic before it was tried
    "no_data",  # the loader delivered nothing, or only what another worker delivered too
]
RateUnit = Literal["samples/s", "batches/s"]
"""Batches where it is not known how many samples they hold."""
FailurePhase = Literal["plan", "start", "first_batch", "batches", "step", "shutdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """How one burst is to be run."""

    max_s: float = 2.0  # longest time the timed window may last, in seconds
    min_s: float = 0.3  # shortest timed window, in seconds
    relative_error: float = 0.02  # the window closes early once the rate's relative 95% half-width is below this
    deadline_s: float = 60.0  # the burst fails when it has not answered after this many seconds, start-up included
    stages: bool = False  # watch in the workers where the time of a sample goes
    prefill_s: float = 0.0  # sleep before the first batch, so that queues are as full as in the midst of training
    anew: bool = True
    """Workers start as in training; otherwise spawned ones are cloned from a process that has the dataset."""
    place: int | None = None  # number of where to read, the same in every probe; None: each goes on by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of the probe's process tree at the end of a burst's window."""

    rss_bytes: int  # sum of the resident set sizes; pages that processes share count once for each
    pss_bytes: int | None = None  # sum of the proportional set sizes; None where the kernel does not tell
    shm_bytes: int | None = None  # use of /dev/shm above what was there before the burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one burst measured."""

    samples_per_s: Interval  # sustained rate of the training loop; `count` is the batches in the window
    samples: int = 0  # samples in the window
    window_s: float = 0.0  # length of the timed window
    batch_size: float  # mean samples of a batch
    first_batch_s: float | None
    """From creating the iterator to the first batch; None where workers did not start as in training."""
    wait_share: float  # share of the window in which the training loop waited for data
    service_s: float  # mean wall seconds a worker spent on one batch (S)
    service_cpu_s: float  # mean CPU seconds a worker spent on one batch
    receive_s: float  # mean seconds to hand over a batch that was ready (u)
    step_s: float  # mean seconds of one training step (g)
    pin_s: float | None = None
    """Mean seconds in which a thread pins a batch, without those of locking pages for the first time; None where none does."""
    cpu_share: float | None = None  # CPU use of the loop and its workers in the window, as a share of the usable cores
    foreign_cpu_share: float | None = None  # of the CPUs in the affinity mask, kept busy by everything else: noise
    read_bytes: int | None = None  # read from storage in the window; 0 where the data came from memory
    batch_bytes: int = 0  # bytes of the tensors in one batch
    memory: MemoryUse | None = None
    gpu_busy_share: float | None = None
    """Share of the window in which the device was in a step, by its own events: gaps between kernels count, copies do not.
    None off a GPU."""
    copy_s: float | None = None
    """Mean seconds in which the copy of a batch to the device keeps its step from beginning; None off a device. Of a step that
    moves its batches, and so has them in `step_s`: seconds of a copy alone."""
    gpu_memory_bytes: int | None = None  # peak memory of the job on the device, as torch allocated it
    gpu_utilization: float | None = None
    """Share of the window in which any kernel of any process ran on the device, as NVML tells it: gaps between kernels do not
    count, and neither does how much of the device a kernel fills. None where NVML does not tell, and of a short window."""
    gpu_used_bytes: int | None = None  # most memory in use on the device, by all processes, as NVML tells it
    traces: tuple[BatchTrace, ...] = field(default=(), compare=False)  # every batch of the burst, window or not
    stages: StageSamples | None = field(default=None, compare=False)  # None without workers, or if nobody watched

    @classmethod
    def of(
        cls,
        traces: Sequence[BatchTrace],
        rate: Interval,
        *,
        window_s: float,
        first_batch_s: float | None,
        wait_share: float,
    ) -> Measurement:
        """What the batches of a window say, beside what is known; the share of waiting is limited to 0 to 1."""
        pins = [trace.pin_s for trace in traces if trace.pin_end is not None]
        return cls(
            samples_per_s=rate,
            window_s=window_s,
            first_batch_s=first_batch_s,
            samples=sum(trace.samples for trace in traces),
            batch_size=fmean(trace.samples for trace in traces),
            wait_share=min(max(0.0, wait_share), 1.0),
            service_s=fmean(trace.service_s for trace in traces),
            service_cpu_s=fmean(trace.cpu_s for trace in traces),
            receive_s=fmean(trace.receive_s for trace in traces),
            step_s=fmean(trace.step_s for trace in traces),
            pin_s=fmean(pins) if pins else None,
        )

    @property
    def read_bytes_per_sample(self) -> float | None:
        """Bytes that a sample costs the storage; 0 where samples came from memory, None where that was not measured."""
        return None if self.read_bytes is None or not self.samples else self.read_bytes / self.samples

    @property
    def taken_bytes(self) -> int | None:
        """Memory of all processes together: PSS, or RSS where PSS is not known; None where it was not measured."""
        return None if self.memory is None else self.memory.pss_bytes or self.memory.rss_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a burst failed. Failures are data: the study records them and goes on."""

    kind: FailureKind
    phase: FailurePhase
    message: str  # one sentence for a person, with what to do about it where that is known
    retryable: bool = False  # whether the same configuration may well work the next time
    traceback: str | None = None  # the user's own traceback, where user code raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One burst of one configuration: exactly one of `measurement` and `failure` is there."""

    number: int  # of its trial in the Optuna study; without one its position in the result
    config: LoaderConfig  # as it ran
    round: int | None = None  # number of its paired round, from 0, whose bursts ran in turns; None: it ran alone
    measurement: Measurement | None = None
    failure: Failure | None = None
    predicted_samples_per_s: float | None = None  # what was expected before the burst, where anything was
    seconds: float = 0.0  # wall seconds the trial took, start-up and shutdown included

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError(f"trial {self.number} needs exactly one of measurement and failure")

    @classmethod
    def of(cls, number: int, config: LoaderConfig, outcome: Measurement | Failure, **more: float | None) -> Trial:
        """The trial with this outcome; `more` are other fields."""
        is_measured = isinstance(outcome, Measurement)
        kept = {"measurement" if is_measured else "failure": outcome}
        return cls(number=number, config=config, **kept, **more)  # type: ignore[arg-type]

    @property
    def outcome(self) -> Measurement | Failure:
        """What came of it."""
        return self.measurement or self.failure  # type: ignore[return-value]  # one of them is there

    @property
    def samples_per_s(self) -> float | None:
        """The measured rate; None when the trial failed."""
        return self.measurement.samples_per_s.value if self.measurement else None

    @property
    def log_rate(self) -> float | None:
        """Logarithm of the rate; None where nothing was delivered."""
        return math.log(self.samples_per_s) if self.samples_per_s else None


def averaged(bursts: Sequence[Measurement]) -> Measurement:
    """What several bursts of one configuration say together; traces, and what is not averaged, are those of the last."""
    last, rates = bursts[-1], [each.samples_per_s.value for each in bursts]
    begun = [each.first_batch_s for each in bursts if each.first_batch_s is not None]
    names = (
        *("wait_share", "cpu_share", "foreign_cpu_share", "gpu_busy_share", "gpu_utilization"),
        *("service_s", "service_cpu_s", "receive_s", "step_s", "pin_s", "copy_s"),
    )
    known = {name: [v for each in bursts if (v := getattr(each, name)) is not None] for name in names}
    means: dict[str, Any] = {name: fmean(values) if values else None for name, values in known.items()}
    rate = mean_interval(rates)
    return replace(
        last,
        samples_per_s=last.samples_per_s if len(bursts) == 1 else replace(rate, low=max(0.0, rate.low)),
        first_batch_s=median(begun) if begun else None,
        memory=max(bursts, key=lambda each: each.taken_bytes or 0).memory,
        **means,
    )
