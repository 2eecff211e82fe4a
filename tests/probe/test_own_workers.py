"""A burst ends the workers of its loader; processes that the user's dataset or sampler starts are the user's."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.burst import run_burst
from autotune_loader.probe.step import build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

QUICK = BurstPlan(max_s=0.2, min_s=0.1, relative_error=0.5)


class Helper:
    """A process that is started on first use, in the main process alone."""

    def __init__(self) -> None:
        self.process: Any = None

    def use(self) -> None:
        if self.process is None and get_worker_info() is None:
            self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            self.process.start()


class WithHelper(Dataset[Any]):
    def __init__(self, helper: Helper) -> None:
        self.helper = helper

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.helper.use()
        return torch.tensor([float(index)])


class OrderWithHelper(Sampler[int]):
    def __init__(self, helper: Helper) -> None:
        self.helper = helper

    def __iter__(self) -> Iterator[int]:
        self.helper.use()
        return iter(range(16))

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize("whole_epochs", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_of_the_users_outlives_a_burst_and_the_workers_do_not(workers: int, whole_epochs: bool) -> None:
    helper = Helper()
    data = DataSide.from_dataset(WithHelper(helper), batch_size=4, sampler=OrderWithHelper(helper))
    step = build_step(TrainingSide(), torch.zeros(4, 1))
    plan = BurstPlan(max_s=0.2, min_s=0.1, relative_error=0.5, whole_epochs=whole_epochs)
    try:
        # fork also where it is no default: the helper must not be started by a server of multiprocessing's
        context = "fork" if workers else None
        outcome = run_burst(data, step, LoaderConfig(num_workers=workers, multiprocessing_context=context), plan)

        assert isinstance(outcome, Measurement)
        assert helper.process.is_alive()
        assert multiprocessing.active_children() == [helper.process]
    finally:
        helper.process.kill()
        helper.process.join()
