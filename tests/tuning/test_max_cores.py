"""`max_cores`: bursts run on so many cores, so that what is measured is what will be."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import tune
from autotune_loader.bursts.parent import open_probe
from autotune_loader.machine.affinity import confined_to
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import SimulatedMachine, SimulatedProbe, on_simulated_machines

CORES = sorted(os.sched_getaffinity(0))


def require_one_core() -> None:
    if len(os.sched_getaffinity(0)) != 1:
        raise RuntimeError("more than one core")


class Cores(Dataset[Any]):
    """Can be read on one core only."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        require_one_core()
        return torch.zeros(4)


def on_one_core(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    require_one_core()
    return model(batch).sum()


@pytest.mark.process
def test_a_burst_and_its_workers_run_on_as_many_cores_as_the_process_has() -> None:
    training = TrainingSide(model=torch.nn.Linear(4, 2), train_step=on_one_core)
    workload = Workload(data=DataSide.from_dataset(Cores(), batch_size=8), training=training)
    with confined_to(1), open_probe(workload, inspect_machine(), None) as opened:
        burst = opened.probe.burst(LoaderConfig(num_workers=1), BurstPlan(max_s=0.2, min_s=0.1))
    # THEN it worked, and this process has all of its cores again
    assert isinstance(burst, Measurement)
    assert sorted(os.sched_getaffinity(0)) == CORES


class OnOneCore(SimulatedProbe):
    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        require_one_core()
        return super().burst(config, plan)


def test_every_burst_of_a_search_runs_on_as_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a step that binds
    machine = SimulatedMachine(cores=1, cpu_s=0.01, step_s=0.03, step_cores=1.0)
    on_simulated_machines(monkeypatch, lambda workload: machine, OnOneCore)
    result = tune(Cores(), torch.nn.Linear(4, 2), batch_size=8, max_cores=1, progress=False)
    # THEN the baseline was among them, and the step is given no more threads
    assert {trial.config.num_workers > 0 for trial in result.trials} == {False, True}
    assert (result.best.consumer_threads or 1) == 1
    assert result.job is not None
    assert result.job.usable_cores == 1
    # AND afterwards this process has all of its cores again
    assert sorted(os.sched_getaffinity(0)) == CORES
