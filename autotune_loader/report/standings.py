"""Who stands where: every configuration that was tried, once, with the best evidence there is of it.

Rates of the finals stand apart from those of the search: the winner of a search looks better in it than it is (see
`stats`), so that the two are neither ranked against each other nor called a tie. Tables and pictures show these
standings and compute nothing of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune_loader.results.loader_file import Finals
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Interval, Round, mean_interval, mean_of_selected
from autotune_loader.values.trial import Trial

DEFAULT_TOLERANCE = 0.02
"""Of `tune()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One configuration and what is known of it."""

    config: LoaderConfig
    rate: Interval | None
    """Samples/s: mean of the finals, or else of its last burst; None where every burst failed."""
    source: Literal["finals", "trial", "failure"]
    measurement: Measurement | None
    """What its bursts in the finals say together, or else its last burst that worked."""
    failure: Failure | None
    """Why it has no rate."""
    is_best: bool
    is_baseline: bool
    ties_with_best: bool
    """Whether it counts as equally fast, by the rule that made the choice."""


def standings(result: TuningResult) -> tuple[Standing, ...]:
    """Every configuration once: those of the finals and the others that worked, fastest first; then those that failed."""
    # What the rounds say of a configuration stands in place of its burst; one round does not.
    known = {config.key() for config in result.finals.configs if len(result.finals.rates_of(config)) > 1}
    tried = [trial.config for trial in result.trials if trial.config.key() not in known]
    # Whether workers live on shows in no rate: one row for both, unless the other is what one has or had.
    own = [config for config in tried if config in (result.best, result.baseline)]
    kept = {config.key(): config for config in [*tried, *own]}
    configs = dict.fromkeys([*(c for c in tried if c in own or c == kept[c.key()]), *result.finals.configs])
    found = [_standing(config, result) for config in configs]
    # A finalist that only the twin knew, and for which no time was left, has nothing to stand by: that is no failure.
    found = [each for each in found if each.rate or each.failure or each.is_best or each.is_baseline]
    order = ("finals", "trial", "failure")
    return tuple(sorted(found, key=lambda each: (order.index(each.source), -each.rate.value if each.rate else 0.0)))


def tolerance_of(result: TuningResult) -> float:
    """Rates this close count as equal: as the result was tuned, or the default of `tune()` where it does not tell."""
    return DEFAULT_TOLERANCE if result.tolerance is None else result.tolerance


def _standing(config: LoaderConfig, result: TuningResult) -> Standing:
    rate = rate_of(config, result.finals, result.trials, is_best=config == result.best)
    failures = (trial.failure for trial in result.trials if trial.config == config and trial.failure)
    return Standing(
        config=config,
        rate=rate,
        source="failure" if rate is None else "finals" if result.finals.rates_of(config) else "trial",
        measurement=measurement_of(config, result.finals, result.trials),
        failure=next(failures, None) if rate is None else None,
        is_best=config == result.best,
        is_baseline=config == result.baseline,
        ties_with_best=config in result.finals.as_fast,
    )


def rate_of(config: LoaderConfig, finals: Finals, trials: Sequence[Trial], *, is_best: bool = False) -> Interval | None:
    """Samples/s of a configuration: from the finals where it ran in them, or else from its last burst that worked.

    Of a single round, that of its burst; with less than a mean's interval. That of the best one, which these rounds chose, is
    wider: it holds although it was chosen.
    """
    rates, measurement = finals.rates_of(config), measurement_of(config, finals, trials)
    if len(rates) == 1 and measurement is not None and measurement.samples_per_s.value == rates[0]:
        return replace(measurement.samples_per_s, count=1)
    if rates and is_best:
        return mean_of_selected(_as_rounds(finals), config)
    if rates:
        return mean_interval(rates)
    return measurement.samples_per_s if measurement is not None else None


def _as_rounds(finals: Finals) -> list[Round]:
    named = (zip(finals.configs, rates, strict=True) for rates in finals.rounds)
    return [Round(rates={config: rate for config, rate in each if rate}) for each in named]


def measurement_of(config: LoaderConfig, finals: Finals, trials: Sequence[Trial]) -> Measurement | None:
    """What is known of a configuration beyond its rate, from the same bursts; whether workers live on shows in none."""
    final = finals.measurement_of(config)
    if final is not None:
        return final
    own = [trial.measurement for trial in trials if trial.measurement and trial.config.key() == config.key()]
    return own[-1] if own else None


def final_ratios(finals: Finals, a: LoaderConfig, b: LoaderConfig) -> list[tuple[int, float]]:
    """(round, rate of a over rate of b) of every round in which both worked."""
    if a not in finals.configs or b not in finals.configs:
        return []
    first, second = finals.configs.index(a), finals.configs.index(b)
    pairs = [(number, rates[first], rates[second]) for number, rates in enumerate(finals.rounds)]
    return [(number, one / other) for number, one, other in pairs if one and other]
