"""`tune(allow=("compile", "amp"))` end to end: measured where the step binds, and where it does not, said why not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import TuningResult, tune
from autotune_loader.results.loader_file import Verdict
from autotune_loader.tuning.experiments import measure_allowed
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Rows(Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((64,), float(index)), index % 2


class Slow(torch.nn.Module):
    """A step that takes 100 ms, a hundred times a batch: neighbours who take the cores from a fetch hardly show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> Any:
        time.sleep(0.1)
        return self.layer(x)


def test_a_binding_step_is_measured_with_autocast_and_the_result_keeps_it(tmp_path: Path) -> None:
    # GIVEN a step that takes far longer than a batch
    path = tmp_path / "loader.json"
    # WHEN autocast is allowed
    result = tune(
        Rows(0.0), Slow(), batch_size=8, allow=("amp",), budget="25s", output=path, reuse=False, progress=False
    )
    # THEN the result has its ratio and loss, says so in its sentences, and keeps it in the file
    if result.verdict.binding != "step":
        pytest.skip(f"other processes disturb the bursts: {result.verdict.sentence}")
    (found,) = result.accelerations
    assert found.speedup is not None
    assert found.is_same_loss is True
    assert any("autocast(bfloat16)" in sentence for sentence in result.summary)
    assert "Step with autocast(bfloat16)" in result.report()
    assert TuningResult.load(path).accelerations == result.accelerations


def test_a_loader_that_binds_is_the_reason_not_to_measure() -> None:
    # GIVEN a loader far slower than the step WHEN both are allowed
    result = tune(
        Rows(0.002),
        torch.nn.Linear(64, 2),
        batch_size=8,
        allow=("amp", "compile"),
        budget="8s",
        max_workers=1,
        isolation="inline",
        reuse=False,
        progress=False,
    )
    # THEN neither is measured, and the result says why
    assert [found.speedup for found in result.accelerations] == [None, None]
    assert all("the training step does not bind" in (found.note or "") for found in result.accelerations)


class SlowCompiler:
    """A probe whose compiler never answers in time."""

    def acceleration(self, kind: str, consumer_threads: int | None, plan: BurstPlan) -> Failure:
        return Failure(kind="deadline", phase="step", message=f"no answer within {plan.deadline_s:.0f} s")


def test_a_budget_too_small_for_the_compiler_is_named_with_one_that_would_work() -> None:
    # GIVEN 25 s of the budget left WHEN compiling takes longer
    verdict = Verdict(binding="step", sentence="")
    (found,) = measure_allowed(("compile",), verdict, SlowCompiler(), None, lambda: 25.0)
    # THEN the note says which budget would do
    assert found.note == "not measured: it takes longer than the 25 s that were left; budget='5m' would leave it more"
