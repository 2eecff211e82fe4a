"""What no result may break: its figures and findings agree with one another. What was not measured (None) is not asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import geometric_mean

from autotune_loader.diagnosis.ranking import ranking
from autotune_loader.diagnosis.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

ROUNDING = 1e-6
"""Relative or absolute; sums of the same figures in another order differ by less."""
CLOCKS = 0.05
"""Two clocks of the same thing may differ by so much, relatively, beyond their intervals."""
LITTLE = 0.05
"""Less than this share of the time, or of the rate, is nothing to gain."""
PASSED = 1.15
"""A rate may lie so far above the step alone, each timed in bursts."""
FEWEST_ROUNDS = 3
"""Fewer rounds decide nothing."""
SELDOM = ("unclear", "start_up", "in_memory", "memory", "nothing")
"""Bottlenecks that say nothing of waiting."""

Check = Callable[[TuningResult], Iterator[str]]


def contradictions(result: TuningResult) -> list[str]:
    """Every way in which the result contradicts itself, a sentence each; empty where it does not."""
    return [f"{check.__name__.strip('_').replace('_', ' ')}: {text}" for check in CHECKS for text in check(result)]


def _the_ceiling_is_one(result: TuningResult) -> Iterator[str]:
    if result.ceiling is not None and result.rate is not None and result.rate.value > PASSED * result.ceiling.value:
        yield f"the rate is {result.rate.value:.0f}, and the step alone has {result.ceiling.value:.0f}"


def _the_headroom_is_that_of_rate_and_ceiling(result: TuningResult) -> Iterator[str]:
    if result.rate is None or result.ceiling is None or result.bottleneck is None:
        return
    expected = max(0.0, result.ceiling.value / result.rate.value - 1)
    if not _same(expected, result.bottleneck.gain):
        yield f"headroom {result.bottleneck.gain}, rate and ceiling make it {expected}"


def _what_limits_has_something_to_gain(result: TuningResult) -> Iterator[str]:
    found, wait = result.bottleneck, result.wait_share
    gains = [each for each in (wait, None if found is None else found.gain) if each is not None]
    if found is None or not gains or found.kind in SELDOM:
        return
    if found.kind == "step":
        contradicts = max(gains) > 2 * LITTLE and (wait is None or wait > LITTLE)
    else:
        contradicts = (wait if found.kind == "storage" and wait is not None else max(gains)) < LITTLE
    if contradicts:
        yield f"{found.kind} limits, and the loop waits {share_text(wait)} with a headroom of {share_text(found.gain)}"


def _nothing_cheaper_is_as_fast_as_the_choice(result: TuningResult) -> Iterator[str]:
    for row in ranking(result):
        if row.is_as_fast and _is_cheaper(row.config, result.best):
            yield f"{row.config} is marked as fast as {result.best}, and costs less"
        ratios = _ratios(result, row.config, result.best)
        if result.status == "undecided" or len(ratios) < FEWEST_ROUNDS or not _is_cheaper(row.config, result.best):
            continue
        if (ratio := geometric_mean(ratios)) > 1 + result.tolerance:
            yield f"{row.config} costs less than {result.best}, and was {ratio:.3f}x as fast in {len(ratios)} rounds"


def _each_figure_is_that_of_the_table(result: TuningResult) -> Iterator[str]:
    for row in ranking(result):
        if row.config != result.best or row.measurement is None:
            continue
        own = row.measurement
        table = {"wait_share": own.wait_share, "memory_bytes": own.taken_bytes}
        for name, shown in table.items():
            figure = getattr(result, name)
            if figure is not None and not _same(figure, shown):
                yield f"{name} is {figure:g}, in the table {shown}"


def _the_chosen_row_is_whole(result: TuningResult) -> Iterator[str]:
    best = next((row for row in ranking(result) if row.is_best), None)
    if result.rate is not None and (best is None or best.measurement is None):
        yield f"{result.best} has a rate, and neither waiting nor memory"


def _the_speed_up_is_that_of_the_rates(result: TuningResult) -> Iterator[str]:
    ratio, rate, before = result.speedup, result.rate, result.baseline_rate
    if ratio is None:
        return
    if not ratio.low <= ratio.value <= ratio.high:
        yield f"{ratio.value:.2f}x lies outside of {ratio.low:.2f}x to {ratio.high:.2f}x"
    if result.best == result.baseline:
        yield f"{ratio.value:.2f}x over itself"
    if rate is None or before is None or not (rate.is_telling and before.is_telling):
        return
    low, high = rate.low / max(before.high, 1e-9), rate.high / max(before.low, 1e-9)
    if ratio.low > high * (1 + CLOCKS) or ratio.high < low * (1 - CLOCKS):
        yield f"{ratio.value:.2f}x, the rates make it {rate.value / before.value:.2f}x"


def _a_status_has_its_reason(result: TuningResult) -> Iterator[str]:
    if (result.status == "undecided") != (result.undecided is not None):
        yield f"status {result.status}, and undecided is {result.undecided}"


CHECKS: tuple[Check, ...] = (
    *(_the_ceiling_is_one, _the_headroom_is_that_of_rate_and_ceiling, _what_limits_has_something_to_gain),
    *(_nothing_cheaper_is_as_fast_as_the_choice, _each_figure_is_that_of_the_table),
    *(_the_chosen_row_is_whole, _the_speed_up_is_that_of_the_rates),
    _a_status_has_its_reason,
)


def _ratios(result: TuningResult, a: LoaderConfig, b: LoaderConfig) -> list[float]:
    """Rate of a over rate of b in every round in which both worked."""
    first, second = result.rates_of(a), result.rates_of(b)
    return [first[number] / second[number] for number in first.keys() & second.keys()]


def _is_cheaper(config: LoaderConfig, other: LoaderConfig) -> bool:
    """Whether it has fewer workers; of equally many the deeper queue is the safer."""
    return config.batch_size == other.batch_size and config.num_workers < other.num_workers


def _same(one: Interval | float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(float(one), other, rel_tol=ROUNDING, abs_tol=ROUNDING)  # type: ignore[arg-type]
