"""What cannot run beside the caller's own model, and what must be given time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.opening import OpenProbe, compiles
from autotune_loader.tuning.tune import start_of_budget


@pytest.mark.parametrize(
    "said",
    ["CUDA out of memory. Tried to allocate 2.00 GiB", "CUDA error: all CUDA-capable devices are busy or unavailable"],
)
def test_where_a_second_process_does_not_fit_the_gpu_the_error_says_how_to_go_on(said: str) -> None:
    failure = failure_of(RuntimeError(said), "step")
    assert "train_step=0.05" in failure.message


def test_compiling_is_seen_in_model_step_and_what_the_step_calls() -> None:
    # GIVEN what people compile
    model = torch.nn.Linear(2, 1)
    compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    function = torch.compile(torch.sin, backend="eager")
    in_place = torch.nn.Sequential(torch.nn.Linear(2, 1))
    in_place[0].compile(backend="eager")
    sides = [
        TrainingSide(model=compiled),
        TrainingSide(model=in_place),
        TrainingSide(model=model, compiled=("",)),
        TrainingSide(model=model, train_step=lambda model, batch: function(model(batch))),
        TrainingSide(model=model, train_step=lambda model, batch: compiled(batch)),
    ]
    # THEN each is seen, and nothing else is taken for it
    assert [compiles(side) for side in sides] == [True] * 5
    assert not compiles(TrainingSide(model=model, train_step=lambda model, batch: model(batch).sum()))
    assert not compiles(TrainingSide())


def test_a_long_compilation_comes_on_top_of_the_budget_and_a_slow_step_does_not() -> None:
    def opened(warm_up_s: float, side: TrainingSide) -> OpenProbe:
        warmup = WarmupReport(
            step="a step",
            samples=4,
            batch_bytes=16,
            batch_tensors=1,
            on_accelerator=False,
            first_fetch_s=0.01,
            first_fetch_cpu_s=0.01,
            default_threads=1,
            warm_up_s=warm_up_s,
        )
        probe: Any = None
        data = DataSide(dataset=[1], batch_size=1)
        return OpenProbe(probe=probe, workload=Workload(data=data, training=side), warmup=warmup)

    compiled = TrainingSide(compiled=("",))
    begun, (note,) = start_of_budget(100.0, opened(90.0, compiled), 60.0)
    assert begun == 190.0
    assert "took 90 s" in note
    assert start_of_budget(100.0, opened(1.0, compiled), 60.0) == (100.0, [])
    assert start_of_budget(100.0, opened(90.0, TrainingSide()), 60.0) == (100.0, [])
