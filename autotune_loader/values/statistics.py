"""Statistics of bursts and rounds: pure functions of the raw series.

Two units occur. Inside one burst the batches are correlated, and `correlated_mean_interval` allows for it. Between
configurations the unit is the burst: each `Round` times its sides in turns, in random order, and comparisons rest on
`Effects`, in which whatever slows a whole round cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from autotune_loader.values.units import factor_text, number_text

Z_95 = 1.96
"""Standard deviations from the middle to either end of a normal 95% interval."""
TYPICAL_NOISE = 0.03
"""Relative standard deviation of a burst beside others of its round, before anything was measured."""
BURSTS_DIFFER = 0.15
"""Bursts, and the step alone, may differ by so much, relative, and nothing is wrong."""
KNOWN_BEFORE = 2
"""What is believed of noise before the rounds tell counts as so many degrees of freedom."""
QUANTILE_STEPS = 1 << 14
"""Steps in which a density is summed up: six digits of a quantile."""
WORTH_CLAIMING = 1.005
"""Larger ratios are written as 1.01 or more, and those below its inverse as 0.99 or less."""
MIXTURE = 100.0
"""Variance of the effects that a confidence sequence is tuned to, in units of the noise's: a smaller one needs more freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its two-sided confidence interval and the number of observations behind it.

    `float(interval)` is the estimate. A comparison with a number is true if it holds for the whole interval: `interval > 1.1`
    compares `low`, `interval < 1.1` compares `high`. Both are false for a number within the interval. Two intervals have no
    order (TypeError).

    Attributes:
        value: The estimate.
        low, high: Limits of the interval; infinite where nothing is known of the error.
        count: Number of observations.
    """

    value: float
    low: float
    high: float
    count: int

    def __float__(self) -> float:
        return self.value

    def __gt__(self, number: float) -> bool:
        return self.low > _number(number)

    def __ge__(self, number: float) -> bool:
        return self.low >= _number(number)

    def __lt__(self, number: float) -> bool:
        return self.high < _number(number)

    def __le__(self, number: float) -> bool:
        return self.high <= _number(number)

    def __str__(self) -> str:
        """As words: "4.10 (3.89 to 4.33)", and without limits where these tell nothing."""
        return f"{number_text(self.value)} ({self.limits()})" if self.is_telling else number_text(self.value)

    def __format__(self, spec: str) -> str:
        """Its value by a format such as ".2f"; without one as `str()`."""
        return format(self.value, spec) if spec else str(self)

    def limits(self, text_of: Callable[[float], str] = number_text, to: str = " to ") -> str:
        """Low and high as words: "3.89 to 4.33"; empty where they tell nothing."""
        return f"{text_of(self.low)}{to}{text_of(self.high)}" if self.is_telling else ""

    def as_ratio(self) -> str:
        """A ratio without its limits: "2.31x"; "at least 3.50x" where the limits are wider than twice the ratio."""
        if self.is_telling or not (self > WORTH_CLAIMING or self < 1 / WORTH_CLAIMING):
            return factor_text(self.value)
        return f"at least {factor_text(self.low)}" if self > 1 else f"at most {factor_text(self.high)}"

    def as_gain(self) -> str:
        """A ratio in words: "2.31x faster (95% CI 2.20x to 2.42x)", and below 1 "0.90x as fast"."""
        limits = self.limits(factor_text)
        told = f"{self.as_ratio()} {'faster' if self.value >= 1 else 'as fast'}"
        return told + (f" (95% CI {limits})" if limits else "")

    def scaled(self, factor: float) -> Interval:
        """The same of a quantity that is so many times as large."""
        return replace(self, value=factor * self.value, low=factor * self.low, high=factor * self.high)

    @property
    def is_telling(self) -> bool:
        """Whether it narrows anything down: not that of one observation, nor one wider than twice its value."""
        return math.isfinite(self.low) and self.high - self.low <= 2 * abs(self.value)


def _number(value: float) -> float:
    if isinstance(value, Interval):
        raise TypeError("an Interval is compared with a number, not with another Interval. Try their low and high.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: its sides ran in turns, each once."""

    rates: Mapping[Any, float]  # samples/s by candidate, under any key; without those that failed in this round
    foreign_cpu_share: float | None = None  # the largest of a burst of the round, 0 to 1 of the usable cores


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of independent values, at least one, with Student's t interval; infinitely wide for a single value."""
    count = len(values)
    mean = math.fsum(value / count for value in values)  # a sum, or a square, of absurd values would overflow
    if count < 2:
        return Interval(value=mean, low=-math.inf, high=math.inf, count=count)
    error = math.hypot(*(value - mean for value in values)) / math.sqrt((count - 1) * count)
    half = student_t_quantile((1 + confidence) / 2, count - 1) * error
    return Interval(value=mean, low=mean - half, high=mean + half, count=count)


def correlated_mean_interval(series: Sequence[float], period: int = 1) -> Interval:
    """Mean and 95% interval of a correlated series that may repeat every `period` values, its ends averaged over one period.

    Averaging the ends makes the mean independent of where in a period the series was cut: W workers deliver in bursts
    of W. The error comes from overlapping batch means with blocks of about sqrt(n), a multiple of the period, and
    1.5 (n / block - 1) degrees of freedom (Meketon and Schmeiser 1984, "Overlapping batch means: something for
    nothing?"). With too few blocks nothing is known of the error, and the interval is infinitely wide.
    """
    count = len(series)
    totals = list(accumulate(series, initial=0.0))
    # In less than two periods the ends are averaged over what keeps them one period apart.
    ends = min(period, max(count + 1 - period, 1))
    mean = (math.fsum(totals[-ends:]) - math.fsum(totals[:ends])) / ends / (len(totals) - ends)
    block = period * max(1, int(math.sqrt(count)) // period)
    freedom = int(1.5 * (count / block - 1))
    if freedom < 1:
        return Interval(value=mean, low=-math.inf, high=math.inf, count=count)
    squares = math.fsum((b - a - block * mean) ** 2 for a, b in zip(totals, totals[block:], strict=False))
    # The factor that makes the estimate unbiased for independent values; totals differ from means by block squared.
    variance = squares / (block * (count - block + 1) * (count - block))
    half = student_t_quantile(0.975, freedom) * math.sqrt(variance)
    return Interval(value=mean, low=mean - half, high=mean + half, count=count)


def log_ratios(rounds: Sequence[Round], a: Hashable, b: Hashable) -> list[float]:
    """ln(rate of a / rate of b) of every round in which both were timed, in order."""
    return [math.log(each.rates[a] / each.rates[b]) for each in rounds if a in each.rates and b in each.rates]


class Effects:
    """Rounds as ln(rate) = side + round + noise, with one noise for all sides: what rounds say of rates and ratios.

    Its ratios hold at whatever round one stops, so that a side may sit out, and rounds may end, when they say enough. They are
    the t-test's confidence sequence (a normal mixture over the effect in units of the noise, any scale of noise: Lai 1976, "On
    confidence sequences"). The noise is that of all rounds and sides together. After few rounds it may look small by chance, so
    it counts for a little that it is typical, and that no side varies less from round to round than it does: at 1 to 30% of
    noise the intervals are right after two rounds, too (`studies.fidelity.selection`).

    Args:
        rounds: in any order; at least one side ran in one.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        import numpy as np

        self.keys = tuple(dict.fromkeys(key for each in rounds for key in each.rates))
        """Every side that ran at all."""
        self._rounds = rounds
        cells = [
            (self.keys.index(key), n, math.log(rate))
            for n, each in enumerate(rounds)
            for key, rate in each.rates.items()
        ]
        side, number, logs = map(np.array, zip(*cells, strict=True))
        sides, count = len(self.keys), len(rounds)
        design = np.hstack([np.eye(sides)[side], np.eye(count)[number]])
        # A constant may move from the sides to the rounds: these have mean 0.
        balance = np.repeat([0.0, 1.0], [sides, count])
        inverse = np.linalg.pinv(design.T @ design + np.outer(balance, balance))
        found = inverse @ design.T @ logs
        squares = float(((logs - design @ found) ** 2).sum())
        freedom = max(len(cells) - sides - count + 1, 0)
        # What rounds have in common scatters a rate, though no ratio: the scatter of each side around its own mean.
        self._repeats = len(cells) - sides
        means = np.bincount(side, logs) / np.bincount(side)
        self._scatter = float(((logs - means[side]) ** 2).sum())
        before = TYPICAL_NOISE**2 + self._scatter / max(self._repeats, 1)
        self._freedom = freedom + KNOWN_BEFORE
        self._noise_sd = math.sqrt((squares + KNOWN_BEFORE * before) / self._freedom)
        # Logarithm of the rate of each side in a round like the mean one, and covariance in units of the noise's variance.
        self._levels, self._covariance = found[:sides], inverse[:sides, :sides]

    def ratio(self, a: Any, b: Any, confidence: float = 0.95) -> Interval:
        """Rate of `a` over rate of `b`, at whatever round one stops.

        It has no limits where they never ran in one round, nor while no side ran twice.

        Raises:
            ValueError: one of them never ran.
        """
        i, j = self.keys.index(a), self.keys.index(b)
        count = len(log_ratios(self._rounds, a, b))
        value, half = float(self._levels[i] - self._levels[j]), math.inf
        if count and self._repeats:
            unit = float(self._covariance[i, i] + self._covariance[j, j] - 2 * self._covariance[i, j])
            half = self._noise_sd * math.sqrt(unit) * _anytime_quantile(1 / unit, self._freedom, confidence)
        return _exp(Interval(value=value, low=value - half, high=value + half, count=count))

    def rate(self, key: Any, chosen_of: int = 1) -> Interval:
        """Mean rate of a side, with a 95% interval that also holds for one that was chosen of so many by these rounds.

        The error is divided by that number (Benjamini and Yekutieli 2005, for one selected). The middle is not corrected: of
        five equal ones it lies 1.7% too high at 3% noise.
        """
        logs = [math.log(each.rates[key]) for each in self._rounds if key in each.rates]
        freedom = min(self._repeats, len(self._rounds)) + KNOWN_BEFORE
        pooled = (self._scatter + KNOWN_BEFORE * self._noise_sd**2) / (self._repeats + KNOWN_BEFORE)
        value = math.fsum(logs) / len(logs)
        half = student_t_quantile(1 - 0.025 / chosen_of, freedom)
        half = half * math.sqrt(pooled / len(logs)) if len(logs) > 1 else math.inf
        return _exp(Interval(value=value, low=value - half, high=value + half, count=len(logs)))


def _anytime_quantile(observations: float, freedom: float, confidence: float) -> float:
    """Standard errors from the middle to an end of an interval that holds at any stop; infinite with too little freedom."""
    more = 1.0 + observations * MIXTURE
    factor = (math.sqrt(more) / (1 - confidence)) ** (2 / (freedom + 1))
    return math.sqrt(freedom * (factor - 1) / (1 - factor / more)) if factor < more else math.inf


@lru_cache(maxsize=1024)
def student_t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t at a probability of at least 0.5: sqrt(freedom) tan(angle), of density cos^(freedom - 1)."""
    import numpy as np

    edges, step = np.linspace(0.0, math.pi / 2, QUANTILE_STEPS + 1, retstep=True)
    with np.errstate(under="ignore"):  # a script may have made an error of it
        within = np.cumsum(np.cos(edges[:-1] + step / 2) ** (freedom - 1))
    angle = np.interp((2 * probability - 1) * within[-1], np.append(0.0, within), edges)
    return math.sqrt(freedom) * math.tan(angle)


def _exp(logs: Interval) -> Interval:
    high = math.exp(logs.high) if logs.high < 700 else math.inf  # beyond, it would overflow
    return Interval(value=math.exp(logs.value), low=math.exp(logs.low), high=high, count=logs.count)
