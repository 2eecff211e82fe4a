"""All that crosses a process, a disk or a screen: what one burst measured, how it failed, and which trial it belongs to.

Times are seconds on the machine's monotonic clock (the same in every process of one machine), sizes are bytes, shares lie
between 0 and 1. `None` means "not measured"; zero is a measurement.

The life of one batch, as `BatchTrace` keeps it:

    worker     fetch_start ── __getitem__ ── fetch_end ── collate ── collate_end
    consumer                     requested ──────── wait ──────────────── received ── step ── step_end
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from autotune_loader.config import LoaderConfig
from autotune_loader.stats import Interval

MAIN_PROCESS = -1
"""`BatchTrace.worker` of a batch that the consumer fetched itself (0 workers)."""

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
FailurePhase = Literal["plan", "start", "first_batch", "batches", "step", "shutdown"]
TrialRole = Literal["baseline", "default", "search"]
AccelerationKind = Literal["compile", "amp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrace:
    """The history of one batch, in the order of delivery."""

    worker: int
    """Worker that fetched it, from 0; `MAIN_PROCESS` without workers."""
    fetch_start: float
    """When the worker began to fetch, in seconds."""
    fetch_end: float
    """When the last sample was there and collating began, in seconds."""
    collate_end: float
    """When the batch was whole, in seconds."""
    cpu_s: float
    """CPU seconds of fetch and collate together."""
    requested: float
    """When the training loop asked for the batch, in seconds."""
    received: float
    """When the training loop had it, in seconds."""
    step_end: float
    """When the training step was done, in seconds."""
    samples: int
    """Samples in the batch."""

    @property
    def service_s(self) -> float:
        """Wall seconds that a worker spent on the batch: fetch and collate."""
        return self.collate_end - self.fetch_start

    @property
    def wait_s(self) -> float:
        """Seconds the training loop stood still for the batch, its delivery included."""
        return self.received - self.requested

    @property
    def receive_s(self) -> float:
        """Seconds to hand over a batch that was ready: transport, rebuild, pinning."""
        return self.received - max(self.requested, self.collate_end)

    @property
    def step_s(self) -> float:
        """Seconds of the training step."""
        return self.step_end - self.received


def after_first_of_each(traces: Iterable[BatchTrace]) -> list[int]:
    """Positions of the batches that were not the first of their worker, which opens files and fills caches."""
    met: set[int] = set()
    later = []
    for position, trace in enumerate(traces):
        if trace.worker in met:
            later.append(position)
        met.add(trace.worker)
    return later


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """How one burst is to be run. Bursts with the same seed read the same samples in the same order."""

    max_s: float = 2.0
    """Longest time the timed window may last, in seconds."""
    min_s: float = 0.3
    """Shortest timed window, in seconds."""
    relative_error: float = 0.02
    """The window closes early once the rate's 95 % half-width, relative to the rate, is below this."""
    seed: int = 0
    """Chooses the samples and their order."""
    deadline_s: float = 60.0
    """The burst fails when it has not answered after so many seconds, start-up included."""
    whole_epochs: bool = False
    """Run the epochs as training does, with an end and a new start: the rate then includes start-up and the gaps between."""
    batch_size: int | None = None
    """Samples of the cached batch on which a step's ceiling is measured; None for the workload's own."""
    null_dataset: bool = False
    """Hand over copies of one batch instead of fetching, to a step that only pauses: what remains is transport."""
    pause_s: float = 0.0
    """Sleep between the loader's start and the first batch, so that the queues are as full as in the midst of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the probe's process tree during a burst."""

    rss_bytes: int
    """Peak of the summed resident set sizes; pages that processes share count once for each."""
    pss_bytes: int | None = None
    """Peak of the summed proportional set sizes; shared pages count once. None where the kernel does not tell."""
    pss_slope_bytes_per_s: float | None = None
    """Growth of PSS while the burst ran."""
    shm_bytes: int | None = None
    """Peak use of /dev/shm above what was there before the burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What the accelerator did during a burst; every value may be missing, and then `reason` says why."""

    util: float | None = None
    """Time-weighted share of time in which any kernel ran (NVML's definition), 0 to 1."""
    memory_bytes: int | None = None
    """Peak memory used on the device."""
    reason: str | None = None
    """Why utilisation or memory is missing."""
    allocated_bytes: int | None = None
    """Peak of what torch itself allocated there for model, step and batches; None off CUDA."""
    copy_s: float | None = None
    """Mean seconds that a batch took to the device, by its own clock; None off CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one burst measured."""

    samples_per_s: Interval
    """Sustained rate of the training loop, with its 95 % interval; `count` is the batches in the window."""
    samples: int
    """Samples in the window."""
    window_s: float
    """Length of the timed window."""
    batch_size: float
    """Mean samples per batch."""
    first_batch_s: float
    """From creating the iterator to the first batch: worker start-up included."""
    wait_share: float
    """Share of the window in which the training loop waited for data."""
    service_s: float
    """Mean wall seconds a worker spent on one batch (S)."""
    service_cpu_s: float
    """Mean CPU seconds a worker spent on one batch."""
    receive_s: float
    """Mean seconds to hand over a batch that was ready (u)."""
    step_s: float
    """Mean seconds of one training step (g)."""
    cpu_share: float | None = None
    """CPU use of the probe's process tree as a share of the usable cores."""
    foreign_cpu_share: float | None = None
    """Share of the CPUs that this process may run on (its affinity mask) that everything else kept busy; noise."""
    steal_share: float | None = None
    """Share of the same CPUs that a hypervisor gave to others; noise too."""
    batch_bytes: int = 0
    """Bytes of the tensors in one batch."""
    batch_tensors: int = 0
    """Tensors in one batch; each takes a descriptor while it travels."""
    memory: Memory | None = None
    gpu: GpuUse = field(default_factory=lambda: GpuUse(reason="not measured"))
    traces: tuple[BatchTrace, ...] = ()
    """Every batch of the burst from its very first, window or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a burst failed. Failures are data: the study records them and goes on."""

    kind: FailureKind
    phase: FailurePhase
    message: str
    """One sentence for a person, with what to do about it where that is known."""
    retryable: bool = False
    """Whether the same configuration may well work the next time."""
    traceback: str | None = None
    """The user's own traceback, where user code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """What a change to the training step itself would bring, measured on a cached batch: the loader plays no part in it."""

    kind: AccelerationKind
    name: str
    """As a user writes it: "torch.compile", "autocast(bfloat16)"."""
    speedup: Interval | None = None
    """Rate of the changed step over the plain one, from paired rounds; None where it was not measured."""
    loss_difference: float | None = None
    """Largest relative difference of the losses of the first steps, from the same weights on the same batch; None
    where the step returns no loss, or a loss that is no number."""
    loss_noise: float | None = None
    """The same between two runs of the plain step with other random numbers, as dropout makes it."""
    is_same_loss: bool | None = None
    """Whether the difference is what rounding and noise explain; None where there is no loss to compare."""
    warm_up_s: float | None = None
    """Seconds that the first steps took: for torch.compile mostly the compiling."""
    note: str | None = None
    """Why it was not measured, or what else to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration and what came of it: exactly one of `measurement` and `failure` is there."""

    number: int
    """Position in the result, from 0. Optuna numbers also what was asked for and never told: its numbers may run ahead."""
    config: LoaderConfig
    role: TrialRole
    """Why it was tried: the user's own configuration, torch's defaults, or the search."""
    measurement: Measurement | None = None
    failure: Failure | None = None
    predicted_samples_per_s: float | None = None
    """What the twin said before the burst, where it said anything."""
    seconds: float = 0.0
    """Wall seconds the trial took, start-up and shutdown included."""

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError(f"trial {self.number} needs exactly one of measurement and failure")

    @property
    def samples_per_s(self) -> float | None:
        """The measured rate; None when the trial failed."""
        return self.measurement.samples_per_s.value if self.measurement else None


class Probe(Protocol):
    """Runs one configuration for real (or pretends to, in tests). A failing configuration is an answer, not an exception."""

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment with `config` and tell what was measured."""
        ...

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        """Step on one cached batch again and again: the rate that no loader can exceed with these intra-op threads."""
        ...


class CountedProbe:
    """A probe that counts the bursts it is asked for, come what may of them."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.count = 0

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.count += 1
        return self._probe.burst(config, plan)

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        self.count += 1
        return self._probe.step_ceiling(consumer_threads, plan)
