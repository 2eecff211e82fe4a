"""What is late: how long batches take workers of late, and how long a worker may be at one before another one makes it, too."""

from __future__ import annotations

STEP = 1.1
"""By how much the usual duration follows each batch: it settles where half of them take longer."""
NOTED, FADES = 8, 0.92
"""One batch in so many is noted beside those that are the slowest; with each what is left of the slowest: 1% less a batch."""
LATE_S, LATE_FETCHES = 0.5, 3.0
"""A batch that takes longer than the first, and than so many times the slowest of late, is given to another worker, too."""
MOST_COPIES = 3
"""Workers that make one batch at the same time; each of them has twice the time of the one before."""
AHEAD_FADES = 1 / 64
"""Batches that the sampler is less far ahead with each one that is delivered."""


class Pace:
    """How long batches take workers.

    Attributes:
        usual_s, slowest_s: A streaming median, and a maximum that fades; 0 before the first batch.
    """

    def __init__(self) -> None:
        self.usual_s = self.slowest_s = 0.0

    def note(self, fetch_s: float) -> None:
        self.slowest_s = max(fetch_s, FADES * self.slowest_s)
        if not self.usual_s:
            self.usual_s = fetch_s
        else:
            self.usual_s *= STEP if fetch_s > self.usual_s else 1 / STEP

    def limit_s(self, copies: int = 1) -> float:
        """How long the latest of so many copies of a batch may take."""
        return 2.0 ** (copies - 1) * max(LATE_S, LATE_FETCHES * self.slowest_s)
