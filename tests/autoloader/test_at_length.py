"""What other files of this room hold, at length: more schedules, `run`, and the fork server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.autoloader.test_as_torch import CASES, enabled, plain
from tests.autoloader.test_births import differing
from tests.autoloader.test_schedules import run_schedules

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@pytest.mark.timeout(900)
def test_many_schedules_change_nothing() -> None:
    run_schedules(100, derandomize=True)


@CASES
def test_a_scenario_under_run_goes_as_with_dataloader(
    scenario: Callable[..., Any], workers: int
) -> None:
    expected = plain(scenario, workers)
    torch.manual_seed(0)
    assert enabled("run", scenario, workers) == expected


def test_a_fork_servers_worker_is_what_torchs_is(tmp_path: Path) -> None:
    # Python 3.14's fork server has imported the script, too.
    assert differing("forkserver", tmp_path) <= {"imported here"}
