"""What a result consists of, and `loader.json` with it: these dataclasses define the keys of the file below the first level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval

RateUnit = Literal["samples/s", "batches/s"]
Status = Literal["complete", "undecided", "partial", "fallback"]
ENDED: tuple[Status, ...] = ("complete", "undecided")
"""A search that came to its end, and found something that works."""
Binding = Literal["step", "cpu", "wait", "transport", "pinning", "memory", "startup", "in_memory", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeChoice:
    """Samples per batch, and whether the tuner chose them."""

    value: int | None
    tuned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of the best configuration; null means not measured."""

    rate_unit: RateUnit = "samples/s"
    """Of all rates of the result: batches where it is unknown how many samples these hold."""
    samples_per_s: Interval | None = None
    """Rate of the best configuration, from the finals where they were run."""
    baseline_samples_per_s: Interval | None = None
    speedup: Interval | None = None
    """Best over baseline, from paired rounds."""
    ceiling_samples_per_s: Interval | None = None
    """Rate of the training step on a cached batch: no loader can exceed it. Null also where a rate was seen above it."""
    ceiling_doubt: str | None = None
    """Why the ceiling is null although it was measured."""
    wait_share: float | None = None
    """Share of the time in which the training loop waited for data."""
    wait_interval: Interval | None = None
    """The same with its interval over the paired rounds; null before two of them."""
    first_batch_s: float | None = None
    cpu_share: float | None = None
    gpu_busy_share: float | None = None
    """Share of the time in which the GPU was at work on a step, by its own clock; null where the step runs on none."""
    gpu_memory_bytes: int | None = None
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What finding it cost."""

    seconds: float
    """Wall seconds from call to result."""
    bursts: int
    budget_s: float | None = None
    """Wall seconds that the search was given; null, like the two below, where the result was not kept for the next call."""
    max_trials: int | None = None
    """Trials that it was given; null also for any number."""
    was_cut_short: bool = False
    """Whether it ended for want of time or trials, so that more of them might have found more."""

    def is_enough_for(self, budget_s: float, max_trials: int | None = None) -> bool:
        """Whether the search had what the caller grants now, or needed no more."""
        has_trials = self.max_trials is None or (max_trials is not None and max_trials <= self.max_trials)
        return not self.was_cut_short or (budget_s <= (self.budget_s or 0.0) and has_trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which resource binds the best configuration, and how far its ceiling is."""

    binding: Binding
    sentence: str
    """The verdict for a person, with the evidence in numbers."""
    headroom: float | None = None
    """Ceiling over rate, minus one: what a loader that took neither time nor cores would still gain."""

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One concrete next step."""

    action: str
    """What to do, as a sentence."""
    reason: str
    """The measured evidence for it."""
    expected_gain: float | None = None
    """Estimated relative gain in samples/s; None where there is no estimate."""

    def __str__(self) -> str:
        gain, words = self.expected_gain, ""
        if gain is not None:
            words = f" (about {gain * 100:+.0f} %)" if gain < 1 else f" (about {1 + gain:.1f} times the rate)"
        return f"{self.action.rstrip('.')}{words}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """The interleaved paired rounds between the last candidates: fresh bursts that took no part in the search."""

    configs: tuple[LoaderConfig, ...] = ()
    rounds: tuple[tuple[float | None, ...], ...] = ()
    """Samples/s of each configuration in each round; null where its burst failed."""
    whole_epochs: bool = False
    """Whether whole epochs were run, as these are short: the rates include start-up and the gaps between epochs."""
    foreign_cpu_share: tuple[float | None, ...] = ()
    """Largest share of the CPUs that processes of others kept busy in each round; null where it was not measured."""
    measurements: tuple[Measurement | None, ...] = ()
    """What the bursts of each configuration say together; null where it ran in no round that counts."""
    as_fast: tuple[LoaderConfig, ...] = ()
    """Who counts as equally fast as the chosen one, by the rule that chose it: none of them is cheaper."""
    undecided: str | None = None
    """Why the choice is not decided, and what would decide it; null where it is."""

    def __post_init__(self) -> None:
        if any(len(rates) != len(self.configs) for rates in self.rounds):
            raise ValueError(f"every round of the finals needs {len(self.configs)} rates, one for each configuration")
        if any(rate is not None and not 0 < rate < math.inf for rates in self.rounds for rate in rates):
            raise ValueError("a rate of the finals is a positive number, or null where the burst failed")
        if len(self.measurements) not in (0, len(self.configs)):
            raise ValueError(f"the finals need {len(self.configs)} measurements or none, one for each configuration")

    def rates_of(self, config: LoaderConfig) -> tuple[float, ...]:
        """Samples/s of a configuration in each round that it ran in."""
        if config not in self.configs:
            return ()
        column = self.configs.index(config)
        return tuple(rate for rates in self.rounds if (rate := rates[column]))

    def measurement_of(self, config: LoaderConfig) -> Measurement | None:
        """What the bursts of a configuration say together; None where it did not run, or the file is an older one."""
        if config not in self.configs or not self.measurements:
            return None
        return self.measurements[self.configs.index(config)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """An earlier result that was checked and used instead of a new search."""

    tuned_at: str
    """When it was found: ISO 8601, UTC."""
    samples_per_s: float
    """Rate of the best configuration in the check."""
    speedup: float | None
    """Best over the configuration it was paired with; null where it is that configuration itself."""
    rounds: int
    """Paired rounds of the check."""
    seconds: float
    """Wall seconds that the search took then."""
