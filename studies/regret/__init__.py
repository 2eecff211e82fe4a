"""How far is what is chosen from the best there is? See README.md."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune_loader.values import Interval
from studies.study import Row, Table

OURS = "autotune_loader"
WITH_TPE = "tune() with TPE"
VERDICTS = ("faster", "equal", "slower")
NEAR = 0.02
"""A regret up to this counts as having found the best, and so much more or less as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy on one machine, or on one job with one seed."""

    job: str
    strategy: str
    seed: int = 0
    regret: float = 1.0
    """1 - rate of the choice over that of the best, as far as rounds show it; who fails leaves the user with nothing."""
    seconds: float
    workers: int | None = None
    cores: int = 0
    chosen: str = ""
    ratio: tuple[float, float, float] | None = None
    """Its measured rate over that of the best: value, and the ends of the 95% interval."""
    failure: str = ""
    status: str = ""
    """What the result says of itself, where there is one."""
    ours: Sequence[str] = ()
    """One of `VERDICTS` for each run of ours on the same job, from the rounds that have both."""

    @property
    def by_point(self) -> float:
        """The regret without regard to the interval."""
        return self.regret if self.ratio is None else max(0.0, 1 - self.ratio[0])


def table(outcomes: Sequence[Outcome], by: str = "strategy") -> Table:
    """Regret and seconds by strategy, or by another field."""
    measures = {"regret": "regret"} | ({"by point": "by_point"} if any(each.ratio for each in outcomes) else {})
    has_verdicts = any(each.ours for each in outcomes)
    for group in dict.fromkeys(getattr(each, by) for each in outcomes):
        mine = [each for each in outcomes if getattr(each, by) == group]
        cells: dict[str, object] = {by: group, "runs": len(mine)}
        cells["within 2%"] = f"{sum(each.regret <= NEAR for each in mine) / len(mine):.1%}"
        for name, measure in measures.items():
            values = [getattr(each, measure) for each in mine]
            cells |= {f"{name} p{100 * share:.0f}": f"{at(values, share):.1%}" for share in (0.5, 0.9, 0.95)}
        cells |= {f"seconds p{100 * share:.0f}": at([each.seconds for each in mine], share) for share in (0.5, 0.9)}
        workers = [each.workers for each in mine if each.workers is not None]
        cells["mean workers"] = f"{statistics.fmean(workers) if workers else math.nan:.1f}"
        others = Counter(each.status for each in mine if each.status not in ("", "complete"))
        cells["not complete"] = ", ".join(f"{count} {status}" for status, count in others.items())
        beside = Counter(verdict for each in mine for verdict in each.ours)
        cells |= {f"ours {each}": beside[each] if beside else "" for each in VERDICTS if has_verdicts}
        yield Row(cells)


def verdict_of(ratio: Interval) -> str:
    """Ours, whose rate is so many times the other's: equal where the interval holds 1, or is within `NEAR` of it."""
    if ratio.low <= 1 <= ratio.high or (ratio.low >= 1 - NEAR and ratio.high <= 1 / (1 - NEAR)):
        return "equal"
    return "faster" if ratio.low > 1 else "slower"


def at(values: Sequence[float], share: float) -> float:
    """The quantile that is itself one of the values, the larger of two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
