"""What the accelerator did during a burst, from samples of NVML.

Utilisation is the share of time in which any kernel of anyone ran; it does not say how full the GPU was, and is not optimised.
NVML keeps stamped samples of it, every 20 to 170 ms: those of a burst's window tell what they cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autotune_loader.values.measurement import GpuUse

NO_GPU = GpuUse(reason="the step does not run on an NVIDIA GPU")
"""For a step that needs no watching."""


COVERED_SHARE = 0.5
"""Of a window that samples must tell of."""


def use_within(samples: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """Utilisation of a window, from samples that each speak for the time since the one before; None where they cover little.

    Args:
        samples: Times in seconds and shares, oldest first.
        start: Of the window, in the same seconds.
        end: Of the window.
    """
    busy_s, covered_s = busy_within(samples, start, end)
    return busy_s / covered_s if covered_s > 0 and covered_s >= COVERED_SHARE * (end - start) else None


def busy_within(samples: Sequence[tuple[float, float]], start: float, end: float) -> tuple[float, float]:
    """Busy seconds of a window, and of how many of its seconds samples tell; arguments as in `use_within`."""
    busy_s = covered_s = 0.0
    for (before, _), (moment, share) in pairwise(samples):
        inside_s = max(0.0, min(moment, end) - max(before, start))
        busy_s, covered_s = busy_s + inside_s * share, covered_s + inside_s
    return busy_s, covered_s
