"""What a search works on, and what it leaves behind, also when it is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from autotune_loader.decision.evidence import Kind
from autotune_loader.decision.race import RaceOutcome
from autotune_loader.decision.space import Space
from autotune_loader.decision.stopping import StopReason
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.tuning.schedule import fastest
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What was fixed before the search began."""

    workload: Workload
    space: Space
    warmup: WarmupReport
    fingerprint: Fingerprint
    usable_cores: int
    notes: tuple[str, ...]
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is known of the training job before the search begins."""

    usable_cores: int
    """Cores the workers and the step share."""
    default_threads: int
    """Intra-op threads of the untouched training process."""
    step_uses_cores: bool
    """Whether the step computes on the CPU."""
    has_step: bool = True
    """Whether anything is done with a batch."""
    own_config: LoaderConfig | None = None
    """The user's own configuration, where there is one."""
    suggestions: Sequence[LoaderConfig] = ()
    """Tried right after the user's own configuration and torch's default, such as an earlier run's best."""
    epoch_batches: int | None = None
    """Batches of an epoch that a burst may run to its end; None where that is unknown."""
    study_name: str = "autotune"
    fetch_s: float = 0.0
    """Seconds that the main process takes to fetch a batch."""
    first_batch_s: float = 0.0
    """Seconds until the very first batch was there: less, where its fetch was cut short."""

    @classmethod
    def of(cls, run: RunContext, suggestions: Sequence[LoaderConfig], study_name: str) -> Job:
        """The job of a run of `tune()`."""
        data = run.workload.data
        return cls(
            usable_cores=run.usable_cores,
            default_threads=run.warmup.default_threads,
            step_uses_cores=run.workload.on_cpu,
            has_step=run.workload.has_step,
            own_config=run.workload.own_config,
            suggestions=suggestions,
            epoch_batches=None if data.is_iterable else data.batches_per_epoch(run.warmup.burst_batch_size),
            study_name=study_name,
            fetch_s=run.warmup.first_fetch_s,
            first_batch_s=run.warmup.first_batch_s,
        )

    def context(self) -> TwinContext:
        """What the twin needs, before the step was measured alone."""
        threads = float(min(self.default_threads, self.usable_cores))
        return TwinContext(
            usable_cores=self.usable_cores,
            consumer_cores=threads if self.step_uses_cores else 1.0,
            epoch_batches=self.epoch_batches,
        )


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Trials, ceilings, paired rounds, and why exploring ended."""

    baseline: LoaderConfig
    context: TwinContext
    trials: list[Trial] = field(default_factory=list)
    ceilings: dict[int | None, Measurement] = field(default_factory=dict)
    """The step on a cached batch, by `consumer_threads`."""
    ceilings_by_batch: dict[int, Measurement] = field(default_factory=dict)
    """The step on a cached batch of another size, by that size."""
    ceilings_beside: dict[int | None, list[Measurement]] = field(default_factory=dict)
    """The step on a cached batch again, between the paired rounds and so under their load, by batch size."""
    finals: RaceOutcome | None = None
    whole_epochs: bool = False
    """Whether the rounds ran whole epochs, as these are short: their rates include start-up."""
    stop_reason: StopReason | None = None
    bursts: int = 0
    study: optuna.Study | None = None

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
        rates = [measured.samples_per_s for measured in self.ceilings.values()]
        return max(rates, key=lambda rate: rate.value, default=None)

    def ceiling_of(self, config: LoaderConfig) -> Interval | None:
        """Rate of the step on a cached batch of the size that a configuration has; between the rounds, if timed there."""
        beside = self.ceilings_beside.get(config.batch_size)
        if beside:
            rates = [measured.samples_per_s for measured in beside]
            # No mean's interval: two or three of them bound nothing, and the machine may have changed in between.
            return Interval(
                value=fmean(rate.value for rate in rates),
                low=min(rate.low for rate in rates),
                high=max(rate.high for rate in rates),
                count=sum(rate.count for rate in rates),
            )
        if config.batch_size is None:
            return self.ceiling
        measured = self.ceilings_by_batch.get(config.batch_size)
        return None if measured is None else measured.samples_per_s

    def fastest(self) -> Trial | None:
        """The successful trial with the highest measured rate."""
        return fastest(self.trials)
