"""The kinds of tests stay honest: what starts a process or sleeps is no unit test, whoever catches the error."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=False),
        lambda: os.fork() or os._exit(0),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: next(iter(DataLoader([torch.zeros(1)] * 2, num_workers=1, multiprocessing_context="fork"))),
        lambda: time.sleep(0.2),
    ],
    ids=["subprocess", "fork", "spawn", "a worker", "sleep"],
)
def test_what_is_no_unit_test_fails_as_one(act: Callable[[], Any], unit_guard: Any) -> None:
    # WHEN a unit test does this, THEN it does not come to it
    with pytest.raises(pytest.fail.Exception, match=r"a unit test (starts a process|sleeps)"):
        act()
    # AND it is remembered, should the code under test have caught it
    with pytest.raises(pytest.fail.Exception, match="mark it process, system or acceptance"):
        unit_guard.check()
    unit_guard.offence = None


def test_a_test_without_a_mark_is_a_unit_test(request: pytest.FixtureRequest, unit_guard: Any) -> None:
    assert request.node.get_closest_marker("unit")
    assert unit_guard.is_on


@pytest.mark.process
def test_a_test_of_processes_may_start_them(unit_guard: Any) -> None:
    assert not unit_guard.is_on
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
