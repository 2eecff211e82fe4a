"""A process tree as psutil tells it: what it uses, and growth that lasts."""

from __future__ import annotations

import os

import pytest

from autotune_loader.machine.meters.process_tree import PssSample, pss_slope
from autotune_loader.machine.processes import process_start, tree_pss, tree_use


def readings(*values: tuple[float, int, int]) -> list[PssSample]:
    return [PssSample(at=at, pss_bytes=pss, processes=count) for at, pss, count in values]


@pytest.mark.parametrize(
    ("pss", "slope"),
    [
        (readings((1, 100, 3), (2, 200, 3), (4, 400, 3)), 100.0),
        (readings((1, 100, 3), (2, 300, 3), (4, 300, 3)), 0.0),  # it has warmed up
        (readings((1, 100, 1), (2, 200, 3), (4, 400, 3)), None),  # too few with all workers
        (readings((1, 100, 3), (1.5, 200, 3)), None),
        ([], None),
    ],
)
def test_only_growth_that_lasts_has_a_slope(pss: list[PssSample], slope: float | None) -> None:
    assert pss_slope(pss) == (None if slope is None else pytest.approx(slope))


def test_this_process_is_a_tree_and_what_has_ended_is_nothing() -> None:
    use, nobody = tree_use(os.getpid()), 2**22 + 1

    assert use is not None
    assert (use.processes >= 1, use.cpu_s > 0) == (True, True)
    assert (tree_pss(os.getpid()) or 0) > 0
    assert process_start(os.getpid()) is not None
    assert (tree_use(nobody), tree_pss(nobody), process_start(nobody)) == (None, None, None)
