"""Every configuration that was tried, once, with the best evidence there is of it; and whether the ceiling is one.

Rates of the paired rounds stand apart from those of the search: the winner of a search looks better in it than it is, so the
two are neither ranked against each other nor called a tie. Tables and pictures show these rows and compute nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autotune_loader.diagnosis.tables import Caution
from autotune_loader.results.record import Finding
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Interval, mean_interval

Source = Literal["rounds", "search", "failed"]
MEANS_DIFFER, BURSTS_DIFFER = 0.08, 0.15
"""Rates and the step alone may differ by so much, and nothing is wrong: means of rounds, and single bursts."""
HARDLY_STEPS = 0.95
"""A loop that waits for more than this tells nothing of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One configuration and what is known of it."""

    config: LoaderConfig
    rate: Interval | None
    """Mean of the rounds, or else that of its last burst; None where every burst failed."""
    source: Source
    measurement: Measurement | None
    """Its last burst that worked, in the rounds where it ran in them."""
    failure: Failure | None
    """Why it has no rate."""
    is_best: bool
    is_baseline: bool
    is_as_fast: bool
    """Whether it counts as equally fast, by the rule that made the choice."""

    @property
    def memory_bytes(self) -> int | None:
        """Of all processes together; None where it was not measured."""
        memory = None if self.measurement is None else self.measurement.memory
        return None if memory is None else memory.taken_bytes


def ranking(result: TuningResult) -> tuple[Standing, ...]:
    """Those of the rounds, fastest first; then those that only the search ran; then those that failed."""
    # Whether workers live on shows in no rate: one row for both, unless the other is what one has or had.
    own = (result.best, result.baseline)
    kept = {trial.config.key(): trial.config for trial in result.trials if trial.measurement is not None}
    rows: dict[LoaderConfig, Standing] = {}
    for trial in result.trials:
        config = trial.config if trial.config in own else kept.get(trial.config.key(), trial.config)
        if config not in rows:
            rows[config] = _standing(config, result)
    order: tuple[Source, ...] = ("rounds", "search", "failed")
    return tuple(sorted(rows.values(), key=lambda row: (order.index(row.source), -row.rate.value if row.rate else 0.0)))


def _standing(config: LoaderConfig, result: TuningResult) -> Standing:
    rate, in_rounds = rate_of(config, result), bool(result.rates_of(config))
    failures = (trial.failure for trial in result.trials if trial.config == config and trial.failure)
    return Standing(
        config=config,
        rate=rate,
        source="failed" if rate is None else "rounds" if in_rounds else "search",
        measurement=result.measurement_of(config),
        failure=next(failures, None) if rate is None else None,
        is_best=config == result.best,
        is_baseline=config == result.baseline,
        is_as_fast=config in result.as_fast,
    )


def rate_of(config: LoaderConfig, result: TuningResult) -> Interval | None:
    """The rate of a configuration; of the best and the baseline as the result has it, which allows for the choice."""
    rates, measurement = result.rates_of(config), result.measurement_of(config)
    if config == result.best and result.rate is not None:
        rate = result.rate
    elif config == result.baseline and result.baseline_rate is not None:
        rate = result.baseline_rate
    elif len(rates) > 1:
        rate = mean_interval(list(rates.values()))
    elif measurement is not None:
        rate = measurement.samples_per_s
    else:
        return None
    return replace(rate, count=len(rates)) if rates else rate


def ceiling_doubt(result: TuningResult) -> Finding | None:
    """Why the ceiling of a result is none; None where nothing speaks against it, or there is none.

    No rate may lie above it, and the step cannot be faster in the loop than alone.
    """
    ceiling, rate, wait = result.ceiling, result.rate, result.wait_share
    if ceiling is None:
        return None
    for row in ranking(result):
        if row.config.batch_size != result.best.batch_size or row.rate is None:
            continue
        is_mean = row.source == "rounds" and row.rate.count > 1
        if row.rate.value > (1 + (MEANS_DIFFER if is_mean else BURSTS_DIFFER)) * ceiling.value:
            return Caution.CEILING_PASSED(alone=ceiling.value, config=row.config, rate=row.rate.value)
    if rate is None or wait is None or wait > HARDLY_STEPS:
        return None
    in_loop = rate.value / (1 - wait)
    if in_loop > (1 + BURSTS_DIFFER) * ceiling.value:
        return Caution.STEP_FASTER_IN_LOOP(alone=ceiling.value, rate=in_loop)
    return None
