"""What a strategy would have been worth, had it been stopped earlier: of runs that say what they held and since when.

A run is a series of (seconds, regret of what was held from then on).
"""

from __future__ import annotations

from collections.abc import Sequence

NEAR = 0.02
"""A regret up to this counts as having found the best."""

Run = Sequence[tuple[float, float]]


def held_at(run: Run, seconds: float) -> float:
    """The regret at that moment; before its first measurement a run holds nothing, and all is lost."""
    return next((regret for at, regret in reversed(run) if at <= seconds), 1.0)


def share_near(runs: Sequence[Run], seconds: float) -> float:
    """Which share of the runs is near the best at that moment."""
    return sum(held_at(run, seconds) <= NEAR for run in runs) / len(runs)


def share_curve(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Every moment at which some run changes, and the share near the best from then on."""
    moments = sorted({at for run in runs for at, _ in run})
    return moments, [share_near(runs, moment) for moment in moments]


def seconds_to_share(runs: Sequence[Run], share: float) -> float | None:
    """The first moment at which this share of the runs is near the best; None if that never happens."""
    return next((moment for moment, reached in zip(*share_curve(runs), strict=True) if reached >= share), None)
