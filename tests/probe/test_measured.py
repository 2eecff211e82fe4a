"""What a burst in a process of its own tells of real workers: shapes, never rates."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload

pytestmark = pytest.mark.process

SHORT = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=60.0)
START_NAP_S = 0.5
MIB = 1 << 20
HELD: list[bytes] = []


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.zeros(64)


def hold_50_mib(worker: int) -> None:
    HELD.append(b"x" * (50 * MIB))


def nap(worker: int) -> None:
    time.sleep(START_NAP_S)


def test_workers_of_50_mib_each_are_reported_to_10_percent_and_their_start_apart() -> None:
    # GIVEN bursts of a third of a second, with workers that hold 50 MiB each, and with such that start slowly
    with (
        opened(workload(Rows(), 8, worker_init_fn=hold_50_mib)) as holding,
        # opened before either is measured: what is in both, such as torch's libraries, counts by halves in each
        opened(workload(Rows(), 8, worker_init_fn=nap)) as plain,
    ):
        for config, plan in (
            (ONE_WORKER, SHORT),
            (TWO_WORKERS, SHORT),
            (TWO_WORKERS, replace(SHORT, whole_epochs=True)),
        ):
            large, small = (measured(each.probe, config, plan) for each in (holding, plain))
            # THEN memory is that of the workers, which live while it is read, with shared pages counted once each too
            assert large.memory is not None
            assert small.memory is not None
            for name in ("pss_bytes", "rss_bytes"):
                more = getattr(large.memory, name) - getattr(small.memory, name)
                assert more == pytest.approx(config.num_workers * 50 * MIB, rel=0.1)
            assert small.memory.pss_bytes is not None
            assert small.memory.pss_bytes < 0.8 * small.memory.rss_bytes
            # THEN the start of workers, which is once an epoch, is no part of the rate
            assert small.first_batch_s > START_NAP_S
            assert plan.whole_epochs or small.samples / small.samples_per_s.value < START_NAP_S


def threaded_step(model: Any, batch: torch.Tensor) -> None:
    torch.rand(400, 400) @ torch.rand(400, 400)


class FromForkServer(Rows):
    """Works in workers of the fork server alone."""

    def __getitem__(self, index: int) -> torch.Tensor:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if get_worker_info() is not None and b"forkserver" not in parent:
            raise LookupError(f"started by {parent!r}")
        return super().__getitem__(index)


@pytest.fixture
def _threads_and_a_fork_server() -> Iterator[None]:
    """Python 3.14 starts workers through a fork server unless told otherwise."""
    before = multiprocessing.get_start_method(allow_none=True), torch.get_num_threads()
    multiprocessing.set_start_method("forkserver", force=True)
    torch.set_num_threads(4)
    yield
    multiprocessing.set_start_method(before[0], force=True)
    torch.set_num_threads(before[1])


@pytest.mark.usefixtures("_threads_and_a_fork_server")
def test_threads_and_start_method_of_the_program_are_what_is_measured() -> None:
    # GIVEN a process that has run a multi-threaded step, after which a forked child's first one would hang
    threaded_step(None, torch.zeros(1))
    # THEN one in the probe comes back, and its workers come from a fork server
    with opened(workload(FromForkServer(), 8, TrainingSide(train_step=threaded_step))) as probe:
        assert measured(probe.probe, LoaderConfig(num_workers=1), SHORT).step_s > 0
