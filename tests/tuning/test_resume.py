"""A run that was cut off goes on; one that came to its end begins anew."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import TuningResult, tune
from autotune_loader.results.loader_file import ENDED

pytestmark = pytest.mark.process


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
    assert result.status in ENDED
    assert (result.trials[0].seconds, result.trials[0].config) == (first.seconds, first.config)


def test_a_run_that_came_to_its_end_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "loader.json"
    first = quick(path)

    second = quick(path, reuse=False)

    assert {first.status, second.status} <= set(ENDED)
    assert first.trials[0].seconds != second.trials[0].seconds
