"""How far is what is chosen from the best there is? See README.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

OURS = "autotune_loader"
NEAR = 0.02
"""A regret up to this counts as having found the best."""


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
    """Its measured rate over that of the best: value, and the ends of the 95 % interval."""
    failure: str = ""

    @property
    def by_point(self) -> float:
        """The regret without regard to the interval."""
        return self.regret if self.ratio is None else max(0.0, 1 - self.ratio[0])


def table(outcomes: Sequence[Outcome]) -> str:
    """Regret and seconds by strategy, in Markdown."""
    by_point = {"by point": "by_point"} if any(each.ratio for each in outcomes) else {}
    measures = {"regret": "regret", **by_point}
    quantiles = [f"{name} p50 | p90 | p95" for name in measures]
    lines = [f"| strategy | runs | within 2 % | {' | '.join(quantiles)} | seconds p50 | p90 | mean workers |"]
    lines.append("|---" * (6 + 3 * len(measures)) + "|")
    for strategy in dict.fromkeys(each.strategy for each in outcomes):
        mine = [each for each in outcomes if each.strategy == strategy]
        cells = [strategy, str(len(mine)), f"{sum(each.regret <= NEAR for each in mine) / len(mine):.1%}"]
        for measure in measures.values():
            cells += [f"{at([getattr(each, measure) for each in mine], share):.1%}" for share in (0.5, 0.9, 0.95)]
        cells += [f"{at([each.seconds for each in mine], share):.1f}" for share in (0.5, 0.9)]
        workers = [each.workers for each in mine if each.workers is not None]
        lines.append(f"| {' | '.join(cells)} | {statistics.fmean(workers) if workers else math.nan:.1f} |")
    return "\n".join(lines)


def at(values: Sequence[float], share: float) -> float:
    """The quantile that is itself one of the values, the larger of two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
