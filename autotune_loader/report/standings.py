"""Who stands where: every configuration that was tried, once, with the best evidence there is of it.

Rates of the finals stand apart from those of the search: the winner of a search looks better in it than it is (see
`stats`), so that the two are neither ranked against each other nor called a tie. Tables and pictures show these
standings and compute nothing of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotune_loader.report.units import is_telling
from autotune_loader.results.loader_file import Finals
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Interval, mean_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One configuration and what is known of it."""

    config: LoaderConfig
    rate: Interval | None
    """Samples/s: mean of the finals, or else of its last burst; None where every burst failed."""
    source: Literal["finals", "trial", "failure"]
    measurement: Measurement | None
    """The last burst that worked."""
    failure: Failure | None
    """Why it has no rate."""
    is_best: bool
    is_baseline: bool
    ties_with_best: bool
    """Whether the evidence does not tell it from the best, or only by less than the tolerance."""


def standings(result: TuningResult) -> tuple[Standing, ...]:
    """Every configuration once: those of the finals and the others that worked, fastest first; then those that failed."""
    configs = dict.fromkeys([*(trial.config for trial in result.trials), *result.finals.configs])
    found = [_standing(config, result) for config in configs]
    # A finalist that only the twin knew, and for which no time was left, has nothing to stand by: that is no failure.
    found = [each for each in found if each.rate or each.failure or each.is_best or each.is_baseline]
    order = ("finals", "trial", "failure")
    return tuple(sorted(found, key=lambda each: (order.index(each.source), -each.rate.value if each.rate else 0.0)))


def tolerance_of(result: TuningResult) -> float:
    """Rates this close count as equal: as the result was tuned, or the default of `tune()` where it does not tell."""
    return 0.02 if result.tolerance is None else result.tolerance


def _standing(config: LoaderConfig, result: TuningResult) -> Standing:
    rate, measurement = rate_of(config, result), _last_measurement(config, result)
    failures = (trial.failure for trial in result.trials if trial.config == config and trial.failure)
    is_best = config == result.best
    return Standing(
        config=config,
        rate=rate,
        source="failure" if rate is None else "finals" if _final_rates(result.finals, config) else "trial",
        measurement=measurement,
        failure=next(failures, None) if rate is None else None,
        is_best=is_best,
        is_baseline=config == result.baseline,
        ties_with_best=not is_best and _is_tie(config, result),
    )


def rate_of(config: LoaderConfig, result: TuningResult) -> Interval | None:
    """Samples/s of a configuration: from the finals where it ran in them, or else from its last burst that worked."""
    final = _final_rates(result.finals, config)
    if final:
        return mean_interval(final)
    measurement = _last_measurement(config, result)
    return measurement.samples_per_s if measurement else None


def final_ratios(finals: Finals, a: LoaderConfig, b: LoaderConfig) -> list[tuple[int, float]]:
    """(round, rate of a over rate of b) of every round in which both worked."""
    if a not in finals.configs or b not in finals.configs:
        return []
    first, second = finals.configs.index(a), finals.configs.index(b)
    pairs = [(number, rates[first], rates[second]) for number, rates in enumerate(finals.rounds)]
    return [(number, one / other) for number, one, other in pairs if one and other]


def _is_tie(config: LoaderConfig, result: TuningResult) -> bool:
    tolerance = tolerance_of(result)
    ratios = [ratio for _, ratio in final_ratios(result.finals, config, result.best)]
    if len(ratios) == 1:
        return abs(ratios[0] - 1) <= tolerance
    if ratios:
        logs = mean_interval([math.log(ratio) for ratio in ratios])
        return logs.low <= 0 <= logs.high or abs(math.expm1(logs.value)) <= tolerance
    burst, best_burst = _last_measurement(config, result), _last_measurement(result.best, result)
    if burst is None or best_burst is None:
        return False
    rate, best = burst.samples_per_s, best_burst.samples_per_s
    # An interval that tells nothing overlaps everything and shows nothing.
    overlap = is_telling(rate) and is_telling(best) and rate.low <= best.high and best.low <= rate.high
    return overlap or abs(rate.value / best.value - 1) <= tolerance


def _final_rates(finals: Finals, config: LoaderConfig) -> Sequence[float]:
    if config not in finals.configs:
        return ()
    column = finals.configs.index(config)
    return [rate for rates in finals.rounds if (rate := rates[column])]


def _last_measurement(config: LoaderConfig, result: TuningResult) -> Measurement | None:
    measured = [trial.measurement for trial in result.trials if trial.config == config and trial.measurement]
    return measured[-1] if measured else None


def predicted_rates(result: TuningResult, configs: Sequence[LoaderConfig]) -> list[float]:
    """What the twin says of each configuration, in samples/s; nothing where nothing was measured."""
    if not configs or result.twin is None or not any(trial.measurement for trial in result.trials):
        return []
    return [prediction.samples_per_s.value for prediction in result.predict_all(configs)]
