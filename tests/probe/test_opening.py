"""What cannot run beside the caller's own model, and what must be given time: opening a probe on a scarce GPU."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.probe import opening
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.opening import OpenProbe, compiles, open_probe
from autotune_loader.tuning.tune import start_of_budget
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

QUICK = BurstPlan(max_s=0.3, min_s=0.1, relative_error=0.2)
STEP_S = 0.02


class FitsInOneProcess:
    """A step of 20 ms that finds no memory on the device in any process but this one."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self, model: Any, batch: Any) -> None:
        if os.getpid() != self.pid:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        time.sleep(STEP_S)


def fits_nowhere(model: Any, batch: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def workload_of(step: Any) -> Workload:
    data = DataSide.from_dataset(TensorDataset(torch.arange(64.0)), batch_size=4)
    return Workload(data=data, training=TrainingSide(train_step=step))


@pytest.mark.process
@pytest.mark.parametrize("is_taken", [True, False])
def test_where_the_step_fits_no_second_process_the_loader_is_tuned_against_its_time(
    monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    # GIVEN a GPU that this process has to itself, or whose memory it holds
    monkeypatch.setattr(opening, "is_taken_by_this_process", lambda device: is_taken)
    monkeypatch.setattr(opening, "held_bytes", lambda device: 3 << 30)
    # WHEN a probe is opened
    with open_probe(workload_of(FitsInOneProcess()), inspect_machine(), "process", None) as opened:
        burst = opened.probe.burst(LoaderConfig(num_workers=1), QUICK)
    # THEN its step is a wait of the time that the step took here, and the notes say why
    stand_in = opened.workload.training.train_step
    assert isinstance(stand_in, StepTime)
    assert STEP_S <= stand_in.seconds < 3 * STEP_S
    assert isinstance(burst, Measurement)
    assert burst.step_s == pytest.approx(stand_in.seconds, rel=0.5)
    assert opened.warmup.step == str(stand_in)
    assert ("EXCLUSIVE_PROCESS" if is_taken else "3072 MiB") in opened.notes[0]
    assert any("pin_memory" in note for note in opened.notes)


def test_where_it_fits_nowhere_the_error_says_how_to_give_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "is_taken_by_this_process", lambda device: True)
    with (
        pytest.raises(WorkloadError, match=r"EXCLUSIVE_PROCESS.*out of memory.*train_step=0\.05"),
        open_probe(workload_of(fits_nowhere), inspect_machine(), "auto", None),
    ):
        pass


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
