"""How far is what is chosen from the best there is? See README.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

OURS = "autotune_loader"
PLAIN_RULE = "plain rule"
NEAR = 0.02
"""A regret up to this counts as having found the best."""
LOOK_S, LOOK_WORKERS = 1.5, 2
"""The plain rule looks at training for so long, with so many workers."""


def at(values: Sequence[float], share: float) -> float:
    """The quantile that is itself one of the values, the larger of two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
