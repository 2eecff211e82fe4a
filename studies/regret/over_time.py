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
