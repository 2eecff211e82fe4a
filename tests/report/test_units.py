from __future__ import annotations

import math

import pytest

from autotune_loader.report import units
from autotune_loader.values.statistics import Interval


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.rate_text(1234.4), "1,234/s"),
        (units.rate_text(45.61), "45.6/s"),
        (units.rate_text(0.789), "0.789/s"),
        (units.rate_text(None), "-"),
        (units.bytes_text(45 << 20), "45 MiB"),
        (units.bytes_text(5 << 28), "1.25 GiB"),
        (units.bytes_text(12), "12 B"),
        (units.bytes_text(0), "0 B"),
        (units.seconds_text(0.0004), "0.4 ms"),
        (units.seconds_text(0.0123), "12 ms"),
        (units.seconds_text(1.234), "1.23 s"),
        (units.seconds_text(58.3), "58 s"),
        (units.seconds_text(200), "3 min 20 s"),
        (units.share_text(0.004), "0.4 %"),
        (units.share_text(0.724), "72 %"),
        (units.share_text(0.0), "0 %"),
        (units.counted(1, "trial"), "1 trial"),
        (units.counted(1200, "trial"), "1,200 trials"),
    ],
)
def test_writes_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_an_absurdly_wide_interval_is_not_drawn_either() -> None:
    # GIVEN a burst of a few very unequal batches
    wide = Interval(value=157.0, low=0.0005, high=51_860_969.0, count=3)
    # THEN it is not told as if it were known
    assert units.range_text(wide) == "-"
    assert units.relative_error_text(wide) == "± ?"


def test_an_interval_of_one_observation_is_not_drawn_as_one() -> None:
    # GIVEN a rate of which nothing is known but the value
    single = Interval(value=100.0, low=-math.inf, high=math.inf, count=1)
    # THEN no limits are invented
    assert units.range_text(single) == "-"
    assert units.relative_error_text(single) == "± ?"
    assert units.ratio_text(single) == "100.00x"
