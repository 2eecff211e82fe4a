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

ACTS: dict[str, Callable[[], Any]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    "fork": lambda: os.fork() or os._exit(0),
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "sleep": lambda: time.sleep(0.2),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_what_is_no_unit_test_fails_as_one(act: Callable[[], Any], unit_guard: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"a unit test (starts a process|sleeps)"):
        act()
    # AND it is remembered, should the code under test have caught it
    with pytest.raises(pytest.fail.Exception, match="mark it process, system or acceptance"):
        unit_guard.check()
    unit_guard.offence = None
