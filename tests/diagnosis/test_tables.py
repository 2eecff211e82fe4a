"""The tables of what can be said: every row can be filled in, in units; and numbers are written for people."""

from __future__ import annotations

import re
import string

import pytest

from autotune_loader.diagnosis import units
from autotune_loader.diagnosis.tables import Advice, Answer, Table, answer
from autotune_loader.values.statistics import Interval

RATIO = Interval(value=2.31, low=2.2, high=2.42, count=4)
FIGURES = {
    "share": 0.25, "bytes": 1 << 20, "seconds": 0.02, "rate": 1234.5, "ratio": RATIO, "": "words", ".2f": 2.25,
}  # fmt: skip


def test_every_row_can_be_said_in_one_line_that_ends_and_only_with_all_its_figures():
    rows = [row for table in Table.__subclasses__() for row in table]
    assert len(rows) > 80
    for row in rows:
        fields = [(name, spec or "") for _, name, spec, _ in string.Formatter().parse(row.value) if name]
        finding = row(**{name: 3 if spec.startswith("# ") else FIGURES[spec] for name, spec in fields})
        assert finding.kind == row.name.lower()
        assert row.said_by(finding)
        assert not re.search(r"[{}\n]|  ", finding.sentence), row
        assert finding.sentence[-1] in ".:)" or row.value.endswith("}"), row
    assert all(len({row.value for row in table}) == len(table.__members__) for table in Table.__subclasses__())
    with pytest.raises(KeyError):
        Advice.RUN()


@pytest.mark.parametrize(
    ("ratio", "row"),
    [
        ((1.5, 1.4, 1.6), Answer.FASTER),
        ((0.8, 0.7, 0.9), Answer.SLOWER),
        ((1.1, 0.9, 1.3), Answer.NOT_SHOWN),
        ((1.003, 1.001, 1.005), Answer.NOT_SHOWN),  # shown, and not worth a word
        ((1.5, float("-inf"), float("inf")), Answer.UNSURE),
    ],
)
def test_a_gain_is_claimed_only_where_rounds_show_it(ratio, row):
    value, low, high = ratio
    assert row.said_by(answer("new", Interval(value=value, low=low, high=high, count=4), "old"))


TEXTS = {
    units.rate_text: {1234.4: "1,234/s", 0.7891: "0.789/s", 123_456: "123k/s", 1_234_567: "1.23M/s", None: "-"},
    units.share_text: {0.004: "0.4 %", 0.124: "12 %"},
    units.bytes_text: {45 << 20: "45 MiB", (5 << 30) // 4: "1.25 GiB"},
    units.seconds_text: {0.00004: "40 us", 0.0004: "0.4 ms", 1.234: "1.23 s", 200: "3 min 20 s"},
    units.ratio_text: {RATIO: "2.31x (2.20x to 2.42x)"},
    units.range_text: {RATIO: "2.20–2.42", Interval(value=1.0, low=0.0, high=9.0, count=4): "-"},
    lambda count: units.counted(count, "batch"): {1: "1 batch", 1200: "1,200 batches"},
    lambda count: units.counted(count, "epoch"): {2: "2 epochs"},
}


def test_numbers_are_written_for_people():
    for text_of, texts in TEXTS.items():
        assert {number: text_of(number) for number in texts} == texts
