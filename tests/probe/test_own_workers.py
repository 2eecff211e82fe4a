"""A burst ends the workers of its loader; processes that the user's dataset or sampler starts are the user's."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from autotune_loader import tune
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.burst import run_burst
from autotune_loader.probe.step import build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from tests.support.bursts import ALONE, QUICK

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class WithHelper(Dataset[Any]):
    """As dataset and as sampler it starts a process on first use, in the main process alone."""

    process: Any = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.use()
        return torch.tensor([float(index)])

    def __iter__(self) -> Iterator[int]:
        self.use()
        return iter(range(16))

    def use(self) -> None:
        if self.process is None and get_worker_info() is None:
            self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            self.process.start()


# fork also where it is no default: the helper must not be started by a server of multiprocessing's
@pytest.mark.parametrize("whole_epochs", [False, True])
@pytest.mark.parametrize("config", [ALONE, LoaderConfig(num_workers=1, multiprocessing_context="fork")])
def test_a_process_of_the_users_outlives_a_burst_and_the_workers_do_not(
    config: LoaderConfig, whole_epochs: bool
) -> None:
    helped = WithHelper()
    data = DataSide.from_dataset(helped, batch_size=4, sampler=helped)
    step = build_step(TrainingSide(), torch.zeros(4, 1))
    try:
        outcome = run_burst(data, step, config, replace(QUICK, whole_epochs=whole_epochs))

        assert isinstance(outcome, Measurement)
        assert helped.process.is_alive()
        assert multiprocessing.active_children() == [helped.process]
    finally:
        helped.process.kill()
        helped.process.join()


class Queue(Dataset[Any]):
    """As torchio's: it reads samples ahead by a loader of its own, which is made when it is first asked."""

    def __init__(self, workers: int = 0) -> None:
        self.ahead: Any = None
        self.workers = workers

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if self.ahead is None:
            context = "fork" if self.workers else None
            zeros: Any = torch.zeros(1).expand(1 << 20, 1)
            loader = DataLoader(zeros, num_workers=self.workers, batch_size=1, multiprocessing_context=context)
            self.ahead = iter(loader)
        return next(self.ahead)


def test_a_loader_that_the_users_dataset_runs_goes_on_after_tuning() -> None:
    # GIVEN a dataset whose own workers run already
    queue = Queue(workers=1)
    queue[0]
    # WHEN it is tuned
    result = tune(queue, batch_size=4, budget=3, max_trials=1, reuse=False, progress=False)
    # THEN it was without other workers, and its own still work
    assert result.status == "complete"
    assert result.best.num_workers == 0
    assert any("num_workers=0" in warning for warning in result.warnings)
    assert all(queue[index] is not None for index in range(100))
