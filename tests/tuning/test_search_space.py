"""What of the workload and of `allow=` makes the space that is searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.state import make_space

READY = WarmupReport(
    step="nothing",
    samples=8,
    batch_bytes=2048,
    batch_tensors=1,
    on_accelerator=False,
    first_fetch_s=0.01,
    first_fetch_cpu_s=0.001,
    default_threads=1,
)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, length: int = 256) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(64)


class ToldItsEpoch(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def space_of(dataset: Any, *allow: str, training: TrainingSide | None = None) -> Space:
    data = DataSide.from_dataset(dataset, batch_size=8)
    workload = Workload(data=data, training=training or TrainingSide())
    return make_space(workload, READY, inspect_machine(), TuneOptions(allow=frozenset(allow)))


def test_workers_that_would_never_hear_of_the_next_epoch_are_kept_only_when_allowed() -> None:
    """`set_epoch` is called on the dataset of the main process; workers that live on keep the copy of the first epoch."""
    assert space_of(Rows()).persistent_workers
    assert not space_of(ToldItsEpoch()).persistent_workers
    assert space_of(ToldItsEpoch(), "persistent_workers").persistent_workers


def test_workers_that_wait_may_be_many_on_few_cores() -> None:
    """128 ms of waiting before a step of 12 ms want 11 workers, whatever the cores; four a core were too few for two."""
    waits = replace(READY, first_fetch_s=0.128, first_fetch_cpu_s=0.002, step_s=0.012)
    machine = inspect_machine()
    two_cores = replace(machine, cores=replace(machine.cores, usable=2))
    workload = Workload(data=DataSide.from_dataset(Rows(4096), batch_size=8), training=TrainingSide())
    assert make_space(workload, waits, two_cores, TuneOptions()).max_workers >= 20
    assert make_space(workload, replace(waits, step_s=0.1), two_cores, TuneOptions()).max_workers <= 8
    assert make_space(workload, waits, two_cores, TuneOptions(max_workers=6)).max_workers == 6


@pytest.mark.parametrize("said", [{"reads_by_itself": True}, {"on_accelerator": True}, {"same_in_workers": False}])
def test_a_dataset_that_workers_cannot_read_gets_none(said: dict[str, bool]) -> None:
    workload = Workload(data=DataSide.from_dataset(Rows(), batch_size=8), training=TrainingSide())
    space = make_space(workload, replace(READY, **said), inspect_machine(), TuneOptions())  # type: ignore[arg-type]
    assert space.max_workers == 0


def test_batches_out_of_order_are_searched_only_when_allowed() -> None:
    """Out of order, the same seed no longer gives the same training."""
    assert space_of(Rows()).in_order == (True,)
    assert space_of(Rows(), "in_order").in_order == (True, False)


@pytest.mark.parametrize(
    ("device", "pins", "ahead"),
    [
        ("cuda:1", (False, True), (0, 1, 2)),
        ("xpu", (False, True), (0,)),
        ("mps", (False,), (0,)),
        ("cpu", (False,), (0,)),
    ],
)
def test_each_kind_of_device_has_the_roads_to_it_that_torch_has(
    device: str, pins: tuple[bool, ...], ahead: tuple[int, ...]
) -> None:
    """`DevicePrefetcher` copies ahead on CUDA alone, and torch pins nothing for MPS."""
    space = space_of(Rows(), training=TrainingSide(device=device))
    assert (space.pin_memory, space.device_prefetch) == (pins, ahead)


def test_a_wait_in_place_of_the_step_has_no_threads_to_tune() -> None:
    space = space_of(Rows(), training=TrainingSide(train_step=StepTime(0.05)))
    assert (space.consumer_threads, space.pin_memory) == ((None,), (False,))
