"""What no result may break: its figures and sentences agree with one another. What was not measured (None) is not asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import geometric_mean

from autotune_loader.report.ceiling import ceiling_doubt
from autotune_loader.report.standings import final_ratios, standings
from autotune_loader.report.summary import UNDECIDED
from autotune_loader.report.units import rate_text, share_text

from autotune_loader.decision.race import LEAST_OF_WINNER, MIN_ROUNDS, is_at_ceiling
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT, MAX_DISCARDED_SHARE, Interval

ROUNDING = 1e-6
"""Relative or absolute; sums of the same figures in another order differ by less."""
CLOCKS = 0.05
"""Two clocks of the same thing may differ by so much, relatively, beyond their intervals."""
LITTLE = 0.05
"""Less than this share of the time, or of the rate, is nothing to gain."""
FAR = 1.25
"""A burst of the search that is faster than what was chosen by more than this was no luck of the draw."""

Check = Callable[[TuningResult], Iterator[str]]


def contradictions(result: TuningResult) -> list[str]:
    """Every way in which the result contradicts itself, a sentence each; empty where it does not."""
    return [f"{check.__name__.strip('_').replace('_', ' ')}: {text}" for check in CHECKS for text in check(result)]


def _the_ceiling_is_one(result: TuningResult) -> Iterator[str]:
    yield from filter(None, [ceiling_doubt(result)])


def _the_headroom_is_that_of_rate_and_ceiling(result: TuningResult) -> Iterator[str]:
    rate, ceiling, headroom = result.measured.samples_per_s, result.ceiling, result.verdict.headroom
    if rate is None:
        return
    expected = None if ceiling is None else max(0.0, ceiling.value / rate.value - 1)
    if not _same(expected, headroom):
        yield f"headroom {headroom}, rate and ceiling make it {expected}"


def _what_binds_has_something_to_gain(result: TuningResult) -> Iterator[str]:
    binding, wait, headroom = result.verdict.binding, result.measured.wait_share, result.verdict.headroom
    gains = [each for each in (wait, headroom) if each is not None]
    if not gains or binding in ("unknown", "startup", "in_memory", "memory"):
        return
    if binding == "step":
        contradicts = max(gains) > 2 * LITTLE and (wait is None or wait > LITTLE)
    else:
        contradicts = (wait if binding == "wait" and wait is not None else max(gains)) < LITTLE
    if contradicts:
        yield f"{binding} binds, and the loop waits {share_text(wait)} with a headroom of {share_text(headroom)}"


def _advice_promises_no_more_than_there_is(result: TuningResult) -> Iterator[str]:
    headroom, binding = result.verdict.headroom, result.verdict.binding
    for each in result.advice:
        gain = each.expected_gain or 0.0
        if headroom is not None and binding != "step" and gain > headroom + CLOCKS:
            yield f"{each.action!r} promises {gain:.0%}, the headroom is {headroom:.0%}"
        if binding == "unknown" and gain:
            yield f"{each.action!r} promises {gain:.0%}, and what binds is unknown"


def _nothing_cheaper_is_as_fast_as_the_choice(result: TuningResult) -> Iterator[str]:
    for row in standings(result):
        if row.ties_with_best and _is_cheaper(row.config, result.best):
            yield f"{row.config} is marked as fast as {result.best}, and costs less"
        ratios = [ratio for _, ratio in final_ratios(result.finals, row.config, result.best)]
        if result.status == "undecided" or len(ratios) < MIN_ROUNDS or not _is_cheaper(row.config, result.best):
            continue
        ratio = geometric_mean(ratios)  # As the speed-up is; a median of three is one round's ratio.
        if ratio > 1:
            yield f"{row.config} costs less than {result.best}, and was {ratio:.3f}x as fast in {len(ratios)} rounds"


def _each_figure_is_that_of_the_table(result: TuningResult) -> Iterator[str]:
    measured = result.measured
    for row in standings(result):
        table: dict[str, float | None] = {}
        if row.config == result.best:
            table["samples_per_s"] = _value(row.rate)
        if row.config == result.baseline and result.reused is None:
            table["baseline_samples_per_s"] = _value(row.rate)
        if row.config == result.best and row.measurement is not None:
            own = row.measurement
            table |= {"wait_share": own.wait_share, "first_batch_s": own.first_batch_s}
            table["pss_bytes"] = None if own.memory is None else own.memory.pss_bytes
        for name, shown in table.items():
            figure = _value(getattr(measured, name))
            if figure is not None and not _same(figure, shown):
                yield f"{name} is {figure:g}, in the table {shown}"


def _the_chosen_row_is_whole(result: TuningResult) -> Iterator[str]:
    best = next((row for row in standings(result) if row.is_best), None)
    if best is not None and best.rate is not None and best.measurement is None:
        yield f"{result.best} has a rate, and neither waiting nor first batch nor memory"


def _the_speed_up_is_that_of_the_rates(result: TuningResult) -> Iterator[str]:
    ratio, rate, before = result.speedup, result.measured.samples_per_s, result.measured.baseline_samples_per_s
    if ratio is None:
        return
    if not ratio.low <= ratio.value <= ratio.high:
        yield f"{ratio.value:.2f}x lies outside of {ratio.low:.2f}x to {ratio.high:.2f}x"
    if result.best == result.baseline and ratio.value != 1:
        yield f"{ratio.value:.2f}x over itself"
    if rate is None or before is None or not (rate.is_telling and before.is_telling) or result.reused is not None:
        return
    low, high = rate.low / max(before.high, 1e-9), rate.high / max(before.low, 1e-9)
    if ratio.low > high * (1 + CLOCKS) or ratio.high < low * (1 - CLOCKS):
        yield f"{ratio.value:.2f}x, the rates make it {rate.value / before.value:.2f}x"


def _a_choice_is_called_decided_when_it_was(result: TuningResult) -> Iterator[str]:
    if result.status != "complete" or result.reused is not None:
        return
    candidates, rounds = {config.key() for config in result.finals.configs}, len(result.finals.rounds)
    chosen, own_rounds = result.measured.samples_per_s, len(result.finals.rates_of(result.best))
    # Nothing can be faster than the step alone: whoever reaches that needs no more rounds.
    at_ceiling = chosen and own_rounds >= LEAST_OF_WINNER and is_at_ceiling(chosen.value, _value(result.ceiling))
    if len(candidates) < 2 or at_ceiling:
        return
    if rounds < MIN_ROUNDS:
        yield f"complete after {rounds} of at least {MIN_ROUNDS} rounds between {len(candidates)}"
    busy = [share for share in result.finals.foreign_cpu_share if share is not None and share > FOREIGN_CPU_LIMIT]
    if len(busy) > MAX_DISCARDED_SHARE * max(rounds, 1):
        yield f"complete, and others kept the cores busy in {len(busy)} of {rounds} rounds"
    if chosen is None or result.finals.whole_epochs:
        return
    for row in standings(result):
        if row.source == "trial" and row.rate and row.rate.is_telling and row.rate.low > FAR * chosen.value:
            yield f"{row.config} reached {rate_text(row.rate.value)}, the choice {rate_text(chosen.value)}"


def _a_doubt_is_said_first(result: TuningResult) -> Iterator[str]:
    says = bool(result.summary) and result.summary[0].startswith(UNDECIDED)
    if (result.status == "undecided") != says:
        yield f"status {result.status}, and it begins with {result.summary[:1]}"


def _value(figure: Interval | float | None) -> float | None:
    return figure.value if isinstance(figure, Interval) else figure


def _is_cheaper(config: LoaderConfig, other: LoaderConfig) -> bool:
    """Whether it has fewer workers; of equally many the deeper queue is the safer, and what it holds is in `cost`."""
    return config.batch_size == other.batch_size and config.num_workers < other.num_workers


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)


CHECKS: tuple[Check, ...] = (
    *(_the_ceiling_is_one, _the_headroom_is_that_of_rate_and_ceiling, _what_binds_has_something_to_gain),
    *(_advice_promises_no_more_than_there_is, _nothing_cheaper_is_as_fast_as_the_choice),
    *(_each_figure_is_that_of_the_table, _the_chosen_row_is_whole, _the_speed_up_is_that_of_the_rates),
    *(_a_choice_is_called_decided_when_it_was, _a_doubt_is_said_first),
)
