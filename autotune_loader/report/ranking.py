"""Every configuration that was tried, once, with its best evidence: the rows of the table and the points of the picture.

Rates of A/B rounds stand apart from those of the search: the winner of a search looks better in it than it is, so the two
are neither ranked against each other nor called a tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from autotune_loader.results.result import TuningResult
from autotune_loader.values import Failure, Interval, LoaderConfig, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One configuration and what is known of it."""

    config: LoaderConfig
    rate: Interval | None
    """Mean of the rounds, or else that of its last trial; None where every trial failed."""
    source: Literal["rounds", "search", "failed"]
    measurement: Measurement | None
    """Mean of the rounds, or else its last trial that worked."""
    failure: Failure | None
    """Why it has no rate."""


def ranking(result: TuningResult) -> tuple[Standing, ...]:
    """Those of the rounds, fastest first; then those that only the search ran; then those that failed."""
    # persistent_workers does not change a rate: both values share a row, unless one is the best or the baseline.
    own = (result.best, result.baseline)
    kept = {trial.config.key(): trial.config for trial in result.trials if trial.measurement is not None}
    configs = (t.config if t.config in own else kept.get(t.config.key(), t.config) for t in result.trials)
    rows = [_standing(config, result) for config in dict.fromkeys(configs)]
    return tuple(sorted(rows, key=lambda row: (row.source != "rounds", -row.rate.value if row.rate else 0.0)))


def rate_of(config: LoaderConfig, result: TuningResult) -> Interval | None:
    """The rate of a configuration; with limits only where two rounds or more show how much it differs from run to run."""
    rates, measurement = result.rates_of(config), result.measurement_of(config)
    # The result's own rates of the best and the baseline allow for the choice among several.
    rate = {result.baseline: result.baseline_rate, result.best: result.rate}.get(config)
    if rate is None and measurement is not None:
        rate = measurement.samples_per_s
    if rate is None or len(rates) > 1:
        return rate and replace(rate, count=len(rates))
    return Interval(value=rate.value, low=-math.inf, high=math.inf, count=len(rates))


def _standing(config: LoaderConfig, result: TuningResult) -> Standing:
    rates, measurement, rate = result.rates_of(config), result.measurement_of(config), rate_of(config, result)
    failures = (trial.failure for trial in result.trials if trial.config == config and trial.failure)
    return Standing(
        config=config,
        rate=rate,
        source="failed" if rate is None else "rounds" if rates else "search",
        measurement=measurement,
        failure=next(failures, None) if rate is None else None,
    )
