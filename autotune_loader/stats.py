"""Statistics of bursts and rounds: pure functions of the raw series."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its two-sided confidence interval and the number of observations behind it."""

    value: float
    low: float
    high: float
    count: int
