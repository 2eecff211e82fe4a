"""A comparison that may be looked at while it runs: alpha spending over planned looks, and the verdict that follows.

`tune()` looks once, at the end; with `STOPPED_CONFIDENCE`, which is what is left here for the last look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from autotune_loader.values.statistics import MAX_ROUNDS, Interval, mean_interval

LOOKS = (4, 6, 9, 14, 21, 32, 48)
"""Numbers of rounds after which a running comparison may be looked at: every half as many again."""
FINAL_SHARE = 0.5
"""Share of alpha kept for the last look, which is where the power of the hardest comparisons is."""
VERDICT_ALPHA = 0.018
"""Two-sided error of a verdict: less than one A/A comparison in a hundred may call the candidate faster."""
Comparison = Literal["faster", "slower", "tie", "undecided"]


def sequential_interval(log_ratios: Sequence[float], alpha: float = 0.05, *, final: bool = False) -> Interval:
    """Interval of the ratio that stays valid however often a running comparison is looked at.

    Alpha spending (Lan and DeMets 1983) in its simplest form, a union bound over planned looks: each of `LOOKS` has a
    t interval at an equal part of `1 - FINAL_SHARE` of alpha, the last look has the rest. So it holds exactly for
    normal log-ratios of unknown variance, however few. Always-valid mixtures (Howard, Ramdas, McAuliffe and Sekhon
    2021) need no plan, and pay with wider intervals for looks that nobody takes. Rounds since the latest planned look
    wait for the next one.

    Args:
        log_ratios: one value per round, in order, from the comparison's beginning.
        alpha: chance that any of the intervals ever returned misses the truth.
        final: no further round will be run, for a reason other than these values (the budget is spent), so that the
            last look is now. Always so at `MAX_ROUNDS`; values beyond are ignored.

    Raises:
        ValueError: no log-ratios, or an alpha outside (0, 1).
    """
    seen = min(len(log_ratios), MAX_ROUNDS)
    if final or seen == MAX_ROUNDS:
        return _exp(mean_interval(log_ratios[:seen], 1 - alpha * FINAL_SHARE))
    passed = [look for look in LOOKS if look <= seen]
    if passed:
        return _exp(mean_interval(log_ratios[: passed[-1]], 1 - alpha * (1 - FINAL_SHARE) / len(LOOKS)))
    value = math.exp(mean_interval(log_ratios[:seen], 1 - alpha).value)
    return Interval(value=value, low=0.0, high=math.inf, count=seen)


def sequential_verdict(
    log_ratios: Sequence[float], margin: float, alpha: float = VERDICT_ALPHA, *, final: bool = False
) -> Comparison:
    """What the rounds so far show; may be asked after every round.

    "faster" and "slower" mean that `sequential_interval` excludes 1, "tie" that it lies within `margin` of 1 and
    includes it. The chance of a wrong "faster" over the whole comparison is at most alpha / 2.

    Args:
        log_ratios: ln(candidate / reference), one per round, in order.
        margin: relative difference that does not matter, such as 0.02.
        alpha: two-sided error of the whole comparison.
        final: as for `sequential_interval`.
    """
    interval = sequential_interval(log_ratios, alpha, final=final)
    if interval.low > 1:
        return "faster"
    if interval.high < 1:
        return "slower"
    return "tie" if 1 - margin < interval.low and interval.high < 1 + margin else "undecided"


def _exp(logs: Interval) -> Interval:
    low, high = math.exp(logs.low), math.exp(logs.high) if logs.high < 700 else math.inf
    return Interval(value=math.exp(logs.value), low=low, high=high, count=logs.count)
