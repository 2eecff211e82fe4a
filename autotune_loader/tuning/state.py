"""What a search has found so far: the state that it works on, and that an interruption leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune_loader.decision.belief import TwinInputs
from autotune_loader.tuning.finals import FinalsOutcome
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Acceleration, Trial

if TYPE_CHECKING:
    import optuna

# Two failures at so many workers or more, and the search goes no further that way.
FAILURES_TO_STOP_GROWING = 2
RUN_OUT_OF = ("oom_killed", "out_of_memory", "memory_guard", "shared_memory", "descriptors")
# Why a search ends that would have gone on with more of it.
OUT_OF_BUDGET = "the rest of the budget is kept for the finals"
OUT_OF_TRIALS = "max_trials={} were run"


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Trials, ceilings, finals and why the search ended."""

    trials: list[Trial] = field(default_factory=list)
    baseline: LoaderConfig
    epoch_batches: int | None = None
    """Batches of an epoch that a burst may run to its end; None where that is unknown."""
    ceilings: dict[int | None, Measurement] = field(default_factory=dict)
    """The step on a cached batch, by `consumer_threads`."""
    ceilings_by_batch: dict[int, Measurement] = field(default_factory=dict)
    """The step on a cached batch of another size, by that size."""
    finals: FinalsOutcome | None = None
    inputs: TwinInputs
    study: optuna.Study | None = None
    interrupted: bool = False
    bursts: int = 0
    whole_epochs: bool = False
    """Whether the finals ran whole epochs, as these are short: their rates include start-up."""
    stopped_because: str = ""
    accelerations: tuple[Acceleration, ...] = ()
    """What allowed changes of the step would bring, measured after the finals."""

    @property
    def ceiling(self) -> Interval | None:
        """Rate of the step on a cached batch with the best thread count: no loader can exceed it."""
        rates = [measured.samples_per_s for measured in self.ceilings.values()]
        return max(rates, key=lambda rate: rate.value, default=None)

    def ceiling_of(self, config: LoaderConfig) -> Interval | None:
        """Rate of the step on a cached batch of the size that a configuration has."""
        if config.batch_size is None:
            return self.ceiling
        measured = self.ceilings_by_batch.get(config.batch_size)
        return None if measured is None else measured.samples_per_s

    @property
    def was_cut_short(self) -> bool:
        """Whether more time or trials would have been used."""
        return self.stopped_because == OUT_OF_BUDGET or self.stopped_because.startswith(OUT_OF_TRIALS.split("{")[0])

    def fastest(self) -> Trial | None:
        """The successful trial with the highest measured rate."""
        measured = [trial for trial in self.trials if trial.measurement is not None]
        return max(measured, key=lambda trial: trial.samples_per_s or 0.0, default=None)

    def epoch_s(self) -> float | None:
        """Seconds of an epoch at the fastest rate so far; None where its length is unknown."""
        own = [trial.measurement for trial in self.trials if trial.measurement and trial.config.batch_size is None]
        fastest = self.fastest()
        if not own or fastest is None or self.epoch_batches is None or not fastest.samples_per_s:
            return None
        return self.epoch_batches * own[0].batch_size / fastest.samples_per_s

    def first_fetch_s(self) -> float:
        """Seconds in which workers that are there fetch the first batch of an epoch, with the fastest configuration so far."""
        fastest = self.fastest()
        if fastest is None or fastest.measurement is None or not fastest.config.num_workers:
            return 0.0
        return fastest.measurement.service_s

    def startup_s(self, config: LoaderConfig) -> float | None:
        """Seconds in which workers start, measured with the number of them that is nearest; None before any was started."""
        started = [
            (abs(trial.config.num_workers - config.num_workers), trial.measurement)
            for trial in self.trials
            if trial.measurement is not None
            and trial.config.num_workers
            and trial.config.multiprocessing_context == config.multiprocessing_context
        ]
        if not started:
            return None
        nearest = min(started, key=lambda each: each[0])[1]
        # The first batch's own fetch: later ones share the cores with the step.
        first_fetch_s = nearest.traces[0].service_s if nearest.traces else nearest.service_s
        return max(0.0, nearest.first_batch_s - first_fetch_s)

    def too_many_workers(self, config: LoaderConfig) -> Failure | None:
        """A veto learnt from failures: two at or below this many workers, and more of them are not tried."""
        fell = [
            trial.config.num_workers
            for trial in self.trials
            if trial.failure is not None
            and trial.failure.kind in RUN_OUT_OF
            and trial.config.num_workers > 0
            and trial.config.batch_size is None
        ]
        if len(fell) < FAILURES_TO_STOP_GROWING or config.num_workers < sorted(fell)[FAILURES_TO_STOP_GROWING - 1]:
            return None
        return Failure(
            kind="infeasible",
            phase="plan",
            message=f"{config.num_workers} workers were not tried: {len(fell)} trials with {min(fell)} or more ran out of "
            "memory or descriptors",
        )
