"""From the moments at which a burst's epochs ended to their rate: pure functions, for real and simulated bursts alike.

The first epoch is not timed: what it does once (imports, caches, persistent workers) is nothing over a whole training run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, mean_interval

FEWEST_EPOCHS = 3
"""Two epochs in the window at least, and one before it."""
STRETCH = 3.0
"""Where epochs take longer than the plan expects, so many times its length is enough for one epoch in the window."""


def are_enough_epochs(ends: Sequence[float], plan: BurstPlan, begun: float) -> bool:
    """Whether a burst that began at `begun` (s) and whose epochs ended at `ends` may end."""
    if len(ends) < 2:
        return False
    elapsed = ends[-1] - begun
    return elapsed >= plan.max_s * STRETCH or (elapsed >= plan.max_s and len(ends) >= FEWEST_EPOCHS)


def epochs_rate(ends: Sequence[float], samples: int) -> Interval:
    """Samples/s of the epochs after the first, which had so many samples; at least two must have ended."""
    seconds = mean_interval([after - before for before, after in pairwise(ends)])
    half = min((seconds.high - seconds.low) / 2 / seconds.value, math.log(10))
    value = samples / (ends[-1] - ends[0])
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half), count=seconds.count)
