"""The sentences of a result."""

from __future__ import annotations

import math

import pytest

from autotune_loader.tuning import assemble as assembly
from autotune_loader.values.statistics import Interval


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1000.0, 1200.0, "1,100 samples/s (1,000 to 1,200)"),
        (-1900.0, 12900.0, "about 1,100 samples/s, too few or too noisy bursts for an interval"),
        (-math.inf, math.inf, "about 1,100 samples/s, too few or too noisy bursts for an interval"),
    ],
)
def test_a_rate_has_an_interval_only_where_it_tells_something(low: float, high: float, words: str) -> None:
    assert assembly._rate_words(Interval(value=1100.0, low=low, high=high, count=3)) == words
