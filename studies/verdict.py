"""What paired rounds tell of a promise: that it holds, that it is broken, or nothing. Noise and neighbours never break one."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autotune_loader.values import Interval
from autotune_loader.values.statistics import mean_interval

CONFIDENCE = 0.99
"""Of an interval: several rows are judged at once, and a wrong alarm costs a person's hour."""
FREE = 0.9
"""Share of the cores that is to be free: beside neighbours the kernel shares cores by session, which is no promise of ours."""
TRANSFER = 3.0
"""Times as fast as DataLoader with as many workers, where transfer counts."""
SLOWER, SLOWER_S = 1.02, 0.5
"""Times the seconds of DataLoader, and seconds beyond: AutoLoader is never slower than both together."""


class Verdict(enum.Enum):
    KEPT = "kept"
    BROKEN = "broken"
    UNKNOWN = "could not tell"

    @property
    def is_met(self) -> bool | None:
        return {Verdict.KEPT: True, Verdict.BROKEN: False, Verdict.UNKNOWN: None}[self]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours over theirs, paired by round: the geometric mean, and Student's t interval on the logarithms."""
    logs = mean_interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)], CONFIDENCE)
    value, low, high = (_exp(each) for each in (logs.value, logs.low, logs.high))
    return Interval(value=value, low=low, high=high, count=logs.count)


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def fast_enough(rates: Interval, least: float = TRANSFER) -> Verdict:
    """Of rates over DataLoader's: broken where even the upper end is less than promised."""
    return Verdict.BROKEN if rates.high < least else Verdict.KEPT if rates.low >= least else Verdict.UNKNOWN


def never_slower(seconds: Interval, plain_s: float) -> Verdict:
    """Of seconds over DataLoader's, which took `plain_s`: broken where even the lower end is beyond share and seconds."""
    most = SLOWER + SLOWER_S / plain_s
    return Verdict.BROKEN if seconds.low > most else Verdict.KEPT if seconds.high <= most else Verdict.UNKNOWN


class Look(NamedTuple):
    """What was measured, what that tells, and the least share of the cores that were free around it."""

    found: Interval
    verdict: Verdict
    free: float


def confirmed(measure: Callable[[], tuple[Interval, Verdict]], free: Callable[[], float]) -> Look:
    """What a look at a promise tells. It is broken only if it is in two looks, while nobody else wants the cores."""
    before, (found, verdict) = free(), measure()
    share = min(before, free())
    if verdict is Verdict.BROKEN and share >= FREE:
        found, verdict = measure()
        share = min(share, free())
    if verdict is Verdict.BROKEN and share < FREE:
        verdict = Verdict.UNKNOWN
    return Look(found, verdict, share)
