from __future__ import annotations

from autotune_loader.report import units
from autotune_loader.values.statistics import Interval


def test_numbers_are_written_as_people_read_them() -> None:
    rates = [units.rate_text(rate) for rate in (1234.4, 45.61, 0.789, None)]
    sizes = [units.bytes_text(size) for size in (45 << 20, 5 << 28, 12, 0)]
    seconds = [units.seconds_text(each) for each in (0.0004, 0.0123, 1.234, 58.3, 200)]
    shares = [units.share_text(share) for share in (0.004, 0.724, 0.0)]
    assert rates == ["1,234/s", "45.6/s", "0.789/s", "-"]
    assert sizes == ["45 MiB", "1.25 GiB", "12 B", "0 B"]
    assert seconds == ["0.4 ms", "12 ms", "1.23 s", "58 s", "3 min 20 s"]
    assert shares == ["0.4 %", "72 %", "0 %"]
    assert [units.counted(count, "trial") for count in (1, 1200)] == ["1 trial", "1,200 trials"]


def test_an_interval_that_says_nothing_is_not_told_as_if_it_did() -> None:
    unknown = Interval(value=157.0, low=0.0005, high=51_860_969.0, count=3)  # a few very unequal batches
    told = [say(unknown) for say in (units.range_text, units.relative_error_text, units.ratio_text)]
    assert told == ["-", "± ?", "157.00x"]
