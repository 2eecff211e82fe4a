"""Right-sizing: where far fewer workers than those of the fastest configuration are about as fast, these should be chosen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from studies.regret.quantiles import at

# On a plateau so many times the workers of the fastest lose no more than this.
PLATEAU_WORKERS, PLATEAU_LOSS = 0.7, 0.01
# On a long plateau; on a shorter one it may take the fewest workers exactly: 4 where 6 are the fastest, and not 5.
LONG_PLATEAU_WORKERS = 0.5


class RightSizing(Protocol):
    """A choice beside the fastest configuration and beside the one with fewest workers that loses at most `PLATEAU_LOSS`."""

    @property
    def workers(self) -> int: ...
    @property
    def fastest_workers(self) -> int: ...
    @property
    def fewest_workers(self) -> int: ...
    @property
    def regret(self) -> float:
        """1 - its rate over that of the fastest."""
        ...


def are_far_fewer(workers: int, fastest_workers: int, share: float = PLATEAU_WORKERS) -> bool:
    return workers <= share * fastest_workers and fastest_workers > 0


def plateaus(ours: Sequence[RightSizing]) -> str:
    """On how many plateaus as few workers were chosen as would do, in a sentence."""
    mine = [each for each in ours if are_far_fewer(each.fewest_workers, each.fastest_workers)]
    if not mine:
        return "no plateau"
    few = [each for each in mine if are_far_fewer(each.workers, each.fastest_workers)]
    right = [each for each in few if each.regret <= PLATEAU_LOSS]
    long = [each for each in mine if are_far_fewer(each.fewest_workers, each.fastest_workers, LONG_PLATEAU_WORKERS)]
    fewer = statistics.median(1 - each.workers / each.fastest_workers for each in mine)
    slower = [each.regret for each in mine]
    return (
        f"{len(mine)} plateaus: on {len(right)} at least 30 % fewer workers than the fastest, at most 1 % slower; "
        f"on {len(mine) - len(few)} more workers, on {len(few) - len(right)} slower; in the median {fewer:.0%} fewer "
        f"workers and {at(slower, 0.5):.1%} slower (p90 {at(slower, 0.9):.1%}); where half the workers would do: on "
        f"{sum(each in right for each in long)} of {len(long)}"
    )
