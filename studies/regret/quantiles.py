"""Quantiles as the tables of this study give them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def at(values: Sequence[float], share: float) -> float:
    """The quantile that is itself one of the values, the larger of two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
