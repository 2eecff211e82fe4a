"""Every pain and trap that a CPU machine reproduces has a test that names its number: "pain 17", "PAINS 4", "traps 1 to 6"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# The rows of PAINS.md with an experiment behind them (marked X).
PAINS = (2, 3, 4, 5, 8, 9, 11, 12, 15, 16, 17, 24, 26, 27, 28, 36, 37)
TRAPS = (4, 10, 16)


def named(word: str) -> set[int]:
    """The numbers after a word such as "pain", in test names, comments and docstrings."""
    number = r"#?\d+"
    series = rf"{word}s?[ _,]+({number}(?:[ _,]+(?:(?:and|to)[ _]+)?{number})*)"
    found: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        for match in re.finditer(series, path.read_text(), re.IGNORECASE):
            text = match[1].replace("_", " ").replace("#", "")
            found |= {int(each) for each in re.findall(r"\d+", text)}
            for low, high in re.findall(r"(\d+) to (\d+)", text):
                found |= set(range(int(low), int(high) + 1))
    return found


@pytest.mark.parametrize("number", PAINS)
def test_a_test_names_this_pain(number: int) -> None:
    assert number in named("pain")


@pytest.mark.parametrize("number", TRAPS)
def test_a_test_names_this_trap(number: int) -> None:
    assert number in named("trap")
