"""From the moments at which a burst's epochs ended to their rate: pure functions, for real and simulated bursts alike.

The first epoch is not timed: what it does once (imports, caches, persistent workers) is nothing over a whole training run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autotune_loader.pipeline.throughput import wait_share
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, mean_interval


def are_enough_epochs(ends: Sequence[float], plan: BurstPlan, begun: float) -> bool:
    """Whether a burst that began at `begun` (s) and whose epochs ended at `ends` may end."""
    if len(ends) < 2:
        return False
    elapsed = ends[-1] - begun
    # Two epochs in the window and one before it, or, of epochs longer than the plan expects, one and one.
    return elapsed >= 3.0 * plan.max_s or (elapsed >= plan.max_s and len(ends) >= 3)


def epochs_rate(ends: Sequence[float], samples: int) -> Interval:
    """Samples/s of the epochs after the first, which had `samples` in all; at least two must have ended."""
    seconds = mean_interval([after - before for before, after in pairwise(ends)])
    half = min((seconds.high - seconds.low) / 2 / seconds.value, math.log(10))
    value = samples / (ends[-1] - ends[0])
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half), count=seconds.count)


def over_epochs(measured: Measurement, ends: Sequence[float], samples: int) -> Measurement:
    """The measurement of a burst with the rate of its epochs, and the waiting that start-up and gaps are."""
    rate = epochs_rate(ends, samples)
    return replace(
        measured,
        samples_per_s=rate,
        samples=samples,
        window_s=ends[-1] - ends[0],
        wait_share=wait_share(rate, measured.step_s, measured.batch_size),
    )
