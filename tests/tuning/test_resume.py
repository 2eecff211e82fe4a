"""A run that was cut off goes on; one that came to its end begins anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune_loader import TuningResult, tune
from autotune_loader.results.loader_file import ENDED
from tests.support import SimulatedMachine, on_simulated_machines

Call = Callable[..., TuningResult]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Call:
    """`tune()` with one trial, on a machine that is never twice as fast."""
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine(noise_sd=0.05, drift_per_hour=50.0))
    given = {"batch_size": 8, "max_trials": 1, "max_workers": 1, "progress": False}
    return lambda path, **options: tune([0] * 10_000, output=path, **{**given, **options})


def test_an_interrupted_run_is_resumed_from_the_journal_beside_its_file(
    quick: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a run that is cut off once its first trial is on disk
    path = tmp_path / "loader.json"
    original = TuningResult.save

    def save(self: TuningResult, where: Any) -> None:
        original(self, where)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TuningResult, "save", save)
        with pytest.raises(KeyboardInterrupt):
            quick(path)
    (first,) = TuningResult.load(path).trials
    # WHEN it is started again
    result = quick(path)
    # THEN its trial is the one that was measured then
    assert result.status in ENDED
    assert (result.trials[0].seconds, result.trials[0].config) == (first.seconds, first.config)


def test_a_run_that_came_to_its_end_is_not_resumed(quick: Call, tmp_path: Path) -> None:
    path = tmp_path / "loader.json"
    first = quick(path)

    second = quick(path, reuse=False)

    assert {first.status, second.status} <= set(ENDED)
    assert first.trials[0].seconds != second.trials[0].seconds
