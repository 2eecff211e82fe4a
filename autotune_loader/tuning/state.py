"""What a search works on, and what it leaves behind, also when it is interrupted."""

from __future__ import annotations

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
from autotune_loader.tuning.burst_source import fastest
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import optuna


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
    tolerance: float | None = None

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
        epoch_batches=None if data.is_iterable else data.batches_per_epoch(warmup.burst_batch_size),
    )


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Trials, ceilings, paired rounds, and why exploring ended."""

    baseline: LoaderConfig
    context: TwinContext
    trials: list[Trial] = field(default_factory=list)
    ceilings: dict[int | None, Measurement] = field(default_factory=dict)
    """The step on a cached batch, by `consumer_threads`."""
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
