"""Invariants by hypothesis, error rates by simulation with fixed seeds."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune_loader.values import Effects, Interval, Round
from autotune_loader.values.statistics import (
    correlated_mean_interval,
    mean_interval,
    student_t_quantile,
)

rates = st.floats(1e-2, 1e6)
pairs = st.lists(st.tuples(rates, rates), min_size=2, max_size=12)


def rounds_of(values):
    return [Round(rates={"a": a, "b": b}) for a, b in values]


@pytest.mark.parametrize(
    ("number", "above", "below"),
    [
        (1.1, True, False),
        (1.2, False, False),
        (1.5, False, False),
        (2.0, False, False),
        (3, False, True),
    ],
)
def test_a_comparison_holds_for_the_whole_interval(number, above, below):
    interval = Interval(value=1.4, low=1.2, high=2.0, count=3)
    assert (interval > number, number < interval) == (above, above)
    assert (interval < number, number > interval) == (below, below)
    assert (interval >= number) == (above or number == 1.2)
    assert (interval <= number) == (below or number == 2.0)
    assert float(interval) == 1.4


def test_intervals_have_no_order_and_are_equal():
    one, same = (Interval(value=1.4, low=1.2, high=2.0, count=3) for _ in range(2))
    assert one == same
    with pytest.raises(TypeError, match="Try their low and high"):
        sorted([one, same])


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (10, 2.22814), (1000, 1.96234)])
def test_students_quantile_is_the_textbooks(freedom, quantile):
    assert student_t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-4)


def test_a_mean_has_the_textbook_interval():
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (interval.value, interval.count) == (3.0, 5)
    assert interval.high - 3.0 == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-5)
    assert 3.0 - interval.low == pytest.approx(interval.high - 3.0)
    # AND of a single value nothing more is known
    assert mean_interval([2.0]).high == math.inf


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (10.0, 0.0, 20.0, "10.0 (0 to 20.0)"),
        (10.0, -0.1, 20.0, "10.0"),
        (100.0, 99.96, 1234.5, "100"),
        (1234.5, 99.94, 1300, "1,234 (99.9 to 1,300)"),
        (1.0, -math.inf, math.inf, "1.00"),
    ],
)
def test_an_interval_has_limits_that_tell(value, low, high, text):
    assert str(Interval(value=value, low=low, high=high, count=3)) == text


PAIRED = [(103, 100), (111, 105), (98, 97), (102, 100)]


@pytest.mark.parametrize(
    ("said", "ends"),
    [  # each worked out by its formula for two sides, apart from the code
        (lambda two: two.ratio("a", "b"), (1.029216, 0.901002, 1.175675)),
        (lambda two: two.ratio("a", "b", 0.9), (1.029216, 0.917105, 1.155031)),
        (lambda two: two.rate("a"), (103.3943, 98.27316, 108.7823)),
        (lambda two: two.rate("a", 5), (103.3943, 95.73482, 111.6666)),
    ],
)
def test_rates_and_ratios_are_their_formulas(said, ends):
    found = said(Effects(rounds_of(PAIRED)))
    assert (found.value, found.low, found.high) == pytest.approx(ends, rel=1e-6)
    assert found.count == 4
    # AND two rounds of a side alone have one degree of freedom, beside the two known before
    alone = Effects([Round(rates={"c": 9.0}), Round(rates={"c": 9.9})]).rate("c")
    assert alone.high / alone.value == pytest.approx(math.exp(0.161366), rel=1e-5)


@pytest.mark.parametrize(
    ("period", "mean", "half"),
    [
        (1, 3.25, 0.676079),
        (2, 3.233333, 0.682666),
        (3, 3.285714, 0.570827),
        (4, 3.346154, 0.658275),
    ],
)
def test_a_correlated_mean_has_its_formulas_ends(period, mean, half):
    series = [1.0, 3, 2, 5, 4, 2, 6, 1, 3, 4, 4, 2, 5, 3, 1, 6]
    found = correlated_mean_interval(series, period)
    assert found.value == pytest.approx(mean, rel=1e-5)
    assert found.high - found.value == pytest.approx(half, rel=1e-5)
    assert found.value - found.low == pytest.approx(half, rel=1e-5)


def test_a_series_without_correlation_has_the_plain_interval():
    values = [random.Random(n).gauss(10.0, 1.0) for n in range(400)]
    plain, own = mean_interval(values), correlated_mean_interval(values)
    assert own.value == pytest.approx(plain.value)
    assert own.high - own.low == pytest.approx(plain.high - plain.low, rel=0.35)
    # AND too few blocks tell nothing
    assert correlated_mean_interval(values[:3], 2).high == math.inf


@given(st.integers(1, 8), st.integers(0, 7), st.data())
def test_a_periodic_series_has_its_periods_mean(period, shift, data):
    # GIVEN bursts of `period`: one long wait, then none, begun and ended anywhere
    whole = period * data.draw(st.integers(4, 9)) - shift % period
    for count in (whole, data.draw(st.integers(max(period, 2), 2 * period))):
        values = [1.0 if (i + shift) % period == 0 else 0.0 for i in range(count)]
        # THEN its ends are a period apart: else two rounds of workers read three times too fast
        assert correlated_mean_interval(values, period).value == pytest.approx(1 / period)


def test_intervals_of_correlated_series_cover():
    # GIVEN waits that drift in and out over several batches (AR(1), 0.5)
    rng, correlated, independent = random.Random(1), 0, 0
    for _ in range(150):
        values = [rng.gauss(0, 1 / math.sqrt(0.75))]
        for _ in range(199):
            values.append(0.5 * values[-1] + rng.gauss(0, 1))
        own, plain = correlated_mean_interval(values), mean_interval(values)
        correlated += own.low <= 0 <= own.high
        independent += plain.low <= 0 <= plain.high
    # THEN the one for correlated values is honest where the other is not
    assert correlated >= 0.90 * 150 > independent


@settings(max_examples=40)
@given(pairs, st.floats(1e-3, 1e3))
def test_a_ratio_is_that_of_a_faster_machine(values, scale):
    known = Effects(rounds_of(values))
    forth, back = known.ratio("a", "b"), known.ratio("b", "a")
    faster = Effects(rounds_of([(a * scale, b * scale) for a, b in values])).ratio("a", "b")
    assert faster.value == pytest.approx(forth.value, rel=1e-6)
    assert faster.low == pytest.approx(forth.low, rel=1e-4, abs=1e-300)
    # AND the inverse of the other way round
    assert forth.value * back.value == pytest.approx(1)
    assume(forth.high < 1e300 and back.high < 1e300)
    assert forth.low * back.high == pytest.approx(1)


def test_slow_rounds_cancel():
    # GIVEN rounds between which the machine's speed changes by a factor of three
    rounds = [*rounds_of([(102, 100), (306, 300), (51, 50)]), Round(rates={"b": 9.0, "c": 9.0})]
    ratio, apart = (Effects(rounds).ratio("a", other) for other in "bc")
    assert (ratio.value, ratio.count) == (pytest.approx(1.02), 3)
    assert ratio.low < 1.02 < ratio.high
    # THEN two that never met are compared over a third, without a claim
    assert (apart.value, apart.count) == (pytest.approx(1.02), 0)
    assert not apart.is_telling
    with pytest.raises(ValueError, match="not in tuple"):
        Effects(rounds).ratio("a", "d")


@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_a_ratio_holds_whenever_one_stops(noise):
    # GIVEN two equal sides, and somebody who stops as soon as one looks faster
    rng, missed = random.Random(0), 0
    for _ in range(100):
        values = [[100.0 * math.exp(rng.gauss(0.0, noise)) for _ in "ab"] for _ in range(12)]
        seen = (Effects(rounds_of(values[:n])).ratio("a", "b") for n in (2, 3, 4, 6, 8, 12))
        missed += any(not ratio.low <= 1.0 <= ratio.high for ratio in seen)
    # THEN the interval misses the truth in no more than 5% of all runs
    assert missed <= 5


@pytest.mark.parametrize(
    ("count", "ratio", "told", "share"), [(2, 3.0, 2.0, 0.9), (3, 1.3, 1.0, 0.85)]
)
def test_few_rounds_show_what_is_far_above_noise(count, ratio, told, share):
    rng, shown = random.Random(0), 0
    for _ in range(100):
        values = [
            [base * math.exp(rng.gauss(0, 0.03)) for base in (ratio, 1)] for _ in range(count)
        ]
        shown += Effects(rounds_of(values)).ratio("a", "b").low > told
    assert shown >= share * 100
    # AND no single round does
    assert Effects(rounds_of(values[:1])).ratio("a", "b").high == math.inf


def test_the_fastest_of_equals_has_its_true_rate():
    # GIVEN five that are all as fast as 100, 3% noise and four rounds, whose fastest is chosen
    rng, plain, selected = random.Random(0), 0, 0
    for _ in range(600):
        rounds = [Round(rates={key: rng.gauss(100.0, 3.0) for key in "abcde"}) for _ in range(4)]
        best = max("abcde", key=lambda key: fmean(each.rates[key] for each in rounds))
        own, allowing = mean_interval([each.rates[best] for each in rounds]), Effects(rounds)
        plain += own.low <= 100.0 <= own.high
        interval = allowing.rate(best, chosen_of=5)
        selected += interval.low <= 100.0 <= interval.high
    # THEN its own interval misses the truth too often, and the one that allows for it does not
    assert plain < 0.92 * 600
    assert selected >= 0.94 * 600


def test_an_interval_takes_a_numbers_format():
    ratio = Interval(value=2.314, low=2.2, high=2.42, count=4)
    assert f"{ratio:.1f}" == "2.3"
    assert f"{ratio}" == str(ratio)


@pytest.mark.parametrize(
    ("value", "told"),
    [(2.0, "2.00x faster (95% CI 1.80x to 2.20x)"), (0.9, "0.90x as fast (95% CI 0.81x to 0.99x)")],
)
def test_a_ratio_below_one_is_not_faster(value, told):
    ratio = Interval(value=value, low=0.9 * value, high=1.1 * value, count=4)
    assert ratio.as_gain() == told
