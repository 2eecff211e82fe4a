"""What of the workload and of `allow=` makes the space that is searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.search_space import make_space

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


def space_of(dataset: Any, *allow: str) -> Space:
    data = DataSide.from_dataset(dataset, batch_size=8)
    workload = Workload(data=data, training=TrainingSide())
    return make_space(workload, READY, inspect_machine(), TuneOptions(allow=frozenset(allow)))


def test_workers_that_would_never_hear_of_the_next_epoch_are_kept_only_when_allowed() -> None:
    """`set_epoch` is called on the dataset of the main process; workers that live on keep the copy of the first epoch."""
    assert space_of(Rows()).persistent_workers
    assert not space_of(ToldItsEpoch()).persistent_workers
    assert space_of(ToldItsEpoch(), "persistent_workers").persistent_workers


def test_workers_are_kept_where_starting_them_is_a_large_part_of_an_epoch() -> None:
    assert space_of(Rows(64)).persistent_workers
    assert not space_of(Rows(10_000_000)).persistent_workers


def test_a_dataset_that_reads_by_itself_gets_no_workers() -> None:
    workload = Workload(data=DataSide.from_dataset(Rows(), batch_size=8), training=TrainingSide())
    space = make_space(workload, replace(READY, reads_by_itself=True), inspect_machine(), TuneOptions())
    assert space.max_workers == 0


def test_batches_out_of_order_are_searched_only_when_allowed() -> None:
    """Out of order, the same seed no longer gives the same training."""
    assert space_of(Rows()).in_order == (True,)
    assert space_of(Rows(), "in_order").in_order == (True, False)
