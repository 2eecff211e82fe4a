"""What a search works on: the legal configurations of the workload on this machine, and what it leaves behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from autotune_loader.bursts.protocol import WarmupReport
from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Kind
from autotune_loader.decision.race import RaceOutcome
from autotune_loader.decision.space import BatchCost, Limits, Space, least, max_useful_workers
from autotune_loader.decision.stopping import StopReason
from autotune_loader.machine.facts import Fingerprint, Machine, start_method
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.tuning.burst_source import BurstSource, fastest
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import optuna

# Powers of two around the user's batch size, in the order in which they are tried.
BATCH_FACTORS = (2, 4, 0.5)
# "spawn" measures as "forkserver" does, and starts more slowly.
START_METHODS = ("fork", "forkserver")


def batch_sizes(data: DataSide, allow: Collection[str]) -> tuple[int | None, ...]:
    """The user's own batch size (None), and what to try beside it; no batch is larger than an epoch."""
    own = data.batch_size
    if "batch_size" not in allow or own is None:
        return (None,)
    most = data.samples_per_epoch()
    sizes = [int(own * factor) for factor in BATCH_FACTORS]
    return (None, *(size for size in sizes if size >= 1 and size != own and (most is None or size <= most)))


def drop_lasts(data: DataSide, allow: Collection[str]) -> tuple[bool | None, ...]:
    """The user's own choice (None), and True where an epoch ends in a short batch that costs a step of its own."""
    return (None, True) if "drop_last" in allow and not data.drop_last and data.batch_size is not None else (None,)


def start_methods(workload: Workload, allow: Collection[str]) -> tuple[str | None, ...]:
    """The user's own start method (None is the interpreter's default), and the others worth a try."""
    own = workload.own_config.multiprocessing_context if workload.own_config else None
    if "multiprocessing_context" not in allow:
        return (own,)
    others = set(START_METHODS) & set(multiprocessing.get_all_start_methods()) - {own or start_method()}
    return (own, *sorted(others))


def make_space(workload: Workload, warmup: WarmupReport, machine: Machine, settings: TuneOptions) -> Space:
    """The legal configurations of this workload on this machine, within what the user allows."""
    data, kind = workload.data, workload.training.device.partition(":")[0]
    accelerated = kind != "cpu" and not warmup.on_accelerator
    max_workers, capped = _max_workers(data, warmup, machine, settings)
    # Persistent workers of a dataset that is told its epoch would never hear of the next.
    keeps = data.batches_per_epoch() is not None and (not data.has_epochs or "persistent_workers" in settings.allow)
    return Space(
        max_workers=max_workers,
        workers_are_capped=capped,
        pin_memory=(False, True) if accelerated else (False,),
        device_prefetch=(0, 1, 2) if accelerated and kind == "cuda" else (0,),
        persistent_workers=keeps,
        in_order=(True, False) if "in_order" in settings.allow else (True,),
        multiprocessing_contexts=start_methods(workload, settings.allow),
        sharing_strategies=(None, "file_system") if "sharing_strategy" in settings.allow else (None,),
        batch_sizes=batch_sizes(data, settings.allow),
        drop_lasts=drop_lasts(data, settings.allow),
        limits=Limits(
            shm_bytes=least(settings.max_shm_bytes, machine.shm_budget_bytes),
            memory_bytes=least(settings.max_host_memory_bytes, machine.memory_budget_bytes),
            descriptors=machine.open_files,
            device_bytes=_device_bytes(machine, workload),
        ),
        batch=BatchCost(bytes=warmup.batch_bytes, tensors=warmup.batch_tensors, samples=warmup.samples),
    )


def _max_workers(data: DataSide, warmup: WarmupReport, machine: Machine, settings: TuneOptions) -> tuple[int, bool]:
    """The most workers to try, and whether more would break a promise instead of being merely useless."""
    useful = max_useful_workers(machine.usable_cores, warmup.first_fetch_s, warmup.first_fetch_cpu_s, warmup.step_s)
    # A worker beyond the batches of an epoch never gets one.
    useful = min(useful, max(1, data.batches_per_epoch() or useful))
    caps = [settings.max_workers, data.shards]
    caps += [0] if warmup.on_accelerator or warmup.reads_by_itself or not warmup.same_in_workers else []
    caps += [] if warmup.shardable else [1]
    cap = least(*caps)
    if cap is None:
        return useful, False
    return (cap if cap == settings.max_workers else min(cap, useful)), True


def _device_bytes(machine: Machine, workload: Workload) -> int | None:
    """Memory of the accelerator that the step runs on; None for a CPU, or where nobody tells."""
    kind, _, index = workload.training.device.partition(":")
    of_device = {gpu.cuda_index: gpu.memory_bytes for gpu in machine.gpus} if kind == "cuda" else {}
    return of_device.get(int(index or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What is fixed before the search begins."""

    workload: Workload
    space: Space
    warmup: WarmupReport
    fingerprint: Fingerprint
    usable_cores: int
    """Cores that the workers and the step share."""
    notes: tuple[str, ...] = ()
    tolerance: float = 0.02

    @property
    def baseline(self) -> LoaderConfig:
        """What the choice is compared with: the user's own configuration, or else torch's default."""
        return self.workload.own_config or LoaderConfig()


def twin_context(workload: Workload, warmup: WarmupReport, usable_cores: int) -> TwinContext:
    """What the twin needs, before the step was measured alone."""
    data, threads = workload.data, float(min(warmup.default_threads, usable_cores))
    return TwinContext(
        usable_cores=usable_cores,
        consumer_cores=threads if workload.on_cpu else 1.0,
        epoch_batches=None if data.is_iterable else data.batches_per_epoch(),
    )


@dataclass(slots=True, kw_only=True)
class SearchState:
    """One search: what it knows and asks, its trials, ceilings and paired rounds, and why exploring ended."""

    run: RunContext
    source: BurstSource
    beliefs: Beliefs
    trials: list[Trial] = field(default_factory=list)
    ceilings: dict[int | None, Measurement] = field(default_factory=dict)
    """The step on a cached batch, by `consumer_threads`."""
    ceilings_beside: dict[int | None, list[Measurement]] = field(default_factory=dict)
    """The step on a cached batch again, between the paired rounds and so under their load, by batch size."""
    finals: RaceOutcome | None = None
    whole_epochs: bool = False
    """Whether the rounds ran whole epochs, as these are short: their rates include start-up."""
    stop_reason: StopReason | None = None
    study: optuna.Study | None = None

    @property
    def baseline(self) -> LoaderConfig:
        return self.run.baseline

    @property
    def context(self) -> TwinContext:
        return self.source.context

    @property
    def bursts(self) -> int:
        return self.source.bursts

    @property
    def kind(self) -> Kind:
        """What the rounds observe."""
        return "epoch" if self.whole_epochs else "steady"

    @property
    def interrupted(self) -> bool:
        return self.stop_reason is StopReason.INTERRUPTED

    @property
    def best_threads(self) -> int | None:
        """The step's threads with which it was fastest alone."""
        return max(self.ceilings, key=lambda threads: self.ceilings[threads].samples_per_s.value, default=None)

    @property
    def ceiling(self) -> Interval | None:
        """Rate of the step on a cached batch with the best thread count: no loader can exceed it."""
        return self.ceilings[self.best_threads].samples_per_s if self.ceilings else None

    def ceiling_of(self, config: LoaderConfig) -> Interval | None:
        """Rate of the step on a cached batch of the size that a configuration has; between the rounds, if timed there."""
        rates = [measured.samples_per_s for measured in self.ceilings_beside.get(config.batch_size, ())]
        if not rates:
            return self.ceiling if config.batch_size is None else None
        # No mean's interval: two or three of them bound nothing, and the machine may have changed in between.
        return Interval(
            value=fmean(rate.value for rate in rates),
            low=min(rate.low for rate in rates),
            high=max(rate.high for rate in rates),
            count=sum(rate.count for rate in rates),
        )

    def fastest(self) -> Trial | None:
        """The successful trial with the highest measured rate."""
        return fastest(self.trials)
