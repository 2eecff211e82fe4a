"""How bursts are to be run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """How one burst is to be run."""

    max_s: float = 2.0
    """Longest time the timed window may last, in seconds."""
    min_s: float = 0.3
    """Shortest timed window, in seconds."""
    relative_error: float = 0.02
    """The window closes early once the rate's 95 % half-width, relative to the rate, is below this."""
    seed: int = 0
    """Where a probe that is started for this burst begins to read; every burst reads on where the one before it stopped."""
    deadline_s: float = 60.0
    """The burst fails when it has not answered after this many seconds, start-up included."""
    stages: bool = False
    """Watch in the workers where the time of a sample goes."""
    prefill_s: float = 0.0
    """Sleep between the loader's start and the first batch, so that the queues are as full as in the midst of training."""


CEILING_BURST = BurstPlan(max_s=0.6, min_s=0.2, relative_error=0.01)
"""The step alone, on a batch that lies ready: more exact than a burst of the search, because it bounds them all."""
