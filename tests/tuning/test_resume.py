"""A run that was cut off goes on; one that came to its end begins anew. Small versions of `studies/endurance`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import TuningResult, tune

ROOT = Path(__file__).resolve().parents[2]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0005)
        return torch.zeros(3)


def quick(path: Path, **options: Any) -> TuningResult:
    defaults = {"budget": 2, "max_trials": 1, "max_workers": 1, "isolation": "inline", "progress": False}
    return tune(Rows(), batch_size=8, output=path, **{**defaults, **options})


def test_an_interrupted_run_is_resumed_from_the_journal_beside_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a run that is cut off once its first trial is on disk
    path = tmp_path / "loader.json"
    original = TuningResult.save

    def save(self: TuningResult, where: Any) -> None:
        original(self, where)
        raise KeyboardInterrupt

    monkeypatch.setattr(TuningResult, "save", save)
    with pytest.raises(KeyboardInterrupt):
        quick(path)
    monkeypatch.undo()
    (first,) = TuningResult.load(path).trials
    # WHEN it is started again
    result = quick(path)
    # THEN its trial is the one that was measured then
    assert result.status == "complete"
    assert (result.trials[0].seconds, result.trials[0].config) == (first.seconds, first.config)


def test_a_run_that_came_to_its_end_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "loader.json"
    first = quick(path)

    second = quick(path, reuse=False)

    assert (first.status, second.status) == ("complete", "complete")
    assert first.trials[0].seconds != second.trials[0].seconds


def study(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_killed_at_any_moment_is_resumed_and_its_file_loads() -> None:
    said = study("studies.endurance.kills", "--kills", "3", "--seed", "5")

    figures = {line[:20].strip(): int(line[20:]) for line in said.splitlines()}
    assert figures["kills"] == 3
    assert figures["leftover processes"] == 0


@pytest.mark.slow
def test_trial_after_trial_in_trouble_leaves_nothing_and_loses_nothing() -> None:
    said = study("studies.endurance", "--trials", "40", "--seed", "3")

    for what in ("hangs", "leftovers", "lost studies", "studies not well at end", "escaped exceptions"):
        line = next(line for line in said.splitlines() if line.startswith(what))
        assert line.removeprefix(what).split()[0] == "0", said
