"""Real workers, watched."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader.pipeline.stages import StageTime, stage_times
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.burst import run_burst
from autotune_loader.probe.step import build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Photos(Dataset[torch.Tensor]):
    """Waits 6 ms, and computes 3 ms with the interpreter lock and as long in one C call."""

    def __init__(self, raises: int | None = None) -> None:
        self.raises = raises

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetch()
        if self.raises is not None and index % self.raises == 0:
            raise ValueError("odd")
        self.spin()
        return self.sorted()

    def fetch(self) -> None:
        time.sleep(0.006)

    def spin(self) -> None:
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass

    def sorted(self) -> torch.Tensor:
        end, total = time.thread_time() + 0.003, 0
        while time.thread_time() < end:
            total += sum(range(20_000))
        return torch.tensor([total])


def burst(dataset: Any = None, init: Any = None, **config: Any) -> Measurement:
    loader = DataLoader(dataset or Photos(), batch_size=4, shuffle=True, worker_init_fn=init)
    plan = BurstPlan(max_s=2.0, min_s=1.5, relative_error=0.0, stages=True)
    step = build_step(TrainingSide(model=None, train_step=lambda model, batch: None), torch.zeros(4, 1))
    outcome = run_burst(DataSide.from_loader(loader), step, LoaderConfig(**{"num_workers": 1, **config}), plan)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def told(**config: Any) -> dict[str, StageTime]:
    """The stages of a burst after which something is said: on a busy machine one may see too little."""
    bursts = (stage_times(burst(**config).stages) for _ in range(10))
    return {each.stage: each for each in next((stages for stages in bursts if stages), ())}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_waiting_and_computing_are_told_apart(start: str) -> None:
    found = told(multiprocessing_context=start)
    # 6 ms of 12 are waited for, whoever holds the lock and however long
    assert 0.25 < found["fetch"].wall_share < 0.75
    assert found["fetch"].cpu_share < 0.2
    assert 0.25 < found["spin"].cpu_share < 0.75
    assert 0.25 < found["sorted"].cpu_share < 0.75
    assert "test_stage_watch.py" in found["fetch"].where
    assert sum(each.wall_share for each in found.values()) == pytest.approx(1)


def profiles_itself(worker: int) -> None:
    signal.signal(signal.SIGPROF, lambda number, frame: None)


def test_a_worker_that_samples_its_own_cpu_time_is_left_alone() -> None:
    assert burst(init=profiles_itself).stages is None


def test_without_workers_nobody_watches() -> None:
    before = signal.getsignal(signal.SIGPROF)
    assert burst(num_workers=0).stages is None
    assert signal.getsignal(signal.SIGPROF) is before
