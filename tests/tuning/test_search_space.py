"""What of the workload and of `allow=` makes the space that is searched, why there may be nothing to search, and what a
choice changes in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import Machine, inspect_machine, start_method
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.tuning.assemble import cautions
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.state import make_space
from autotune_loader.values.config import LoaderConfig
from tests.support import SimulatedMachine, simulated_run

READY = simulated_run(SimulatedMachine()).warmup


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(100))


class ToldItsEpoch(TensorDataset):
    epoch = 0


def rows(length: int = 100, kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    return kind(torch.zeros(length, 3))


def data(dataset: Any = None, batch_size: int | None = 8, **parts: Any) -> DataSide:
    return DataSide.from_dataset(rows() if dataset is None else dataset, batch_size=batch_size, **parts)


OWN_BATCHES = data(batch_size=None, batch_sampler=BatchSampler(SequentialSampler(rows()), 8, False))


def space_of(
    side: DataSide | None = None,
    *allow: str,
    training: TrainingSide | None = None,
    own: LoaderConfig | None = None,
    machine: Machine | None = None,
    max_workers: int | None = None,
    **ready: Any,
) -> Space:
    workload = Workload(data=side or data(), training=training or TrainingSide(), own_config=own)
    options = TuneOptions(allow=frozenset(allow), max_workers=max_workers)
    return make_space(workload, replace(READY, **ready), machine or inspect_machine(), options)


@pytest.mark.parametrize(
    ("side", "sizes", "why"),
    [
        (data(), (None, 16, 32, 4), ""),
        (data(rows(20)), (None, 16, 4), ""),
        (data(batch_size=1), (None, 2, 4), ""),
        (data(Stream()), (None, 16, 32, 4), ""),
        (data(batch_size=None), (None,), "batch_size=None leaves the batches to the dataset"),
        (OWN_BATCHES, (None,), "a batch_sampler makes the batches"),
        (data(rows(1), batch_size=1), (None,), "an epoch of 1 samples has room for no other than 1"),
    ],
    ids=["map-style", "a small epoch", "single samples", "a stream", "no batches", "own batches", "one sample"],
)
def test_batch_sizes_are_powers_of_two_around_the_users_own_or_it_is_said_why_not(
    side: DataSide, sizes: tuple[int | None, ...], why: str
) -> None:
    space = space_of(side, "batch_size")
    assert space.batch_sizes == sizes
    assert space_of(side).batch_sizes == (None,)


@pytest.mark.parametrize("own", [None, "spawn"])
def test_start_methods_are_the_users_own_and_the_others_and_order_is_kept_unless_allowed(own: str | None) -> None:
    config = LoaderConfig.from_loader(DataLoader(rows(), num_workers=1, multiprocessing_context=own)) if own else None
    closed = space_of(own=config)
    assert (closed.multiprocessing_contexts, closed.in_order) == ((own,), (True,))
    found = space_of(None, "multiprocessing_context", "in_order", own=config)
    assert found.multiprocessing_contexts[0] == own
    assert set(found.multiprocessing_contexts[1:]) == {"fork", "forkserver"} - {own or start_method()}
    assert found.in_order == (True, False)


def test_workers_that_would_never_hear_of_the_next_epoch_are_kept_only_when_allowed() -> None:
    """`set_epoch` is called on the dataset of the main process; workers that live on keep the copy of the first epoch."""
    told = data(rows(kind=ToldItsEpoch))
    assert space_of().persistent_workers
    assert not space_of(told).persistent_workers
    assert space_of(told, "persistent_workers").persistent_workers


@pytest.mark.parametrize("said", [{"reads_by_itself": True}, {"on_accelerator": True}, {"same_in_workers": False}])
def test_a_dataset_that_workers_cannot_read_gets_none(said: dict[str, bool]) -> None:
    assert space_of(**said).max_workers == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("training", "pins", "ahead"),
    [
        (TrainingSide(device="cuda:1"), (False, True), (0, 1, 2)),
        (TrainingSide(device="xpu"), (False, True), (0,)),
        (TrainingSide(train_step=StepTime(0.05)), (False,), (0,)),
    ],
    ids=["cuda", "xpu", "a wait"],
)
def test_each_kind_of_device_has_the_roads_to_it_that_torch_has(
    training: TrainingSide, pins: tuple[bool, ...], ahead: tuple[int, ...]
) -> None:
    """`DevicePrefetcher` copies ahead on CUDA alone; none of these steps has threads."""
    space = space_of(training=training)
    assert (space.pin_memory, space.device_prefetch, space.consumer_threads) == (pins, ahead, (None,))


@pytest.mark.parametrize(
    ("best", "side", "said"),
    [
        ({"batch_size": 32}, data(), "from 8 to 32: the learning rate and its schedule belong to it"),
        ({"batch_size": 32}, data(), "4 times the learning rate is a common start for SGD, 2 times for Adam"),
        ({"num_workers": 1, "in_order": False}, data(), "order differs from run to run"),
        ({"num_workers": 1, "persistent_workers": True}, data(rows(kind=ToldItsEpoch)), "set_epoch()"),
        ({"num_workers": 1, "persistent_workers": True, "consumer_threads": 2}, data(), ""),
    ],
    ids=lambda value: None if isinstance(value, DataSide) else str(value),
)
def test_what_a_choice_changes_in_training_is_said(best: dict[str, Any], side: DataSide, said: str) -> None:
    found = list(cautions(LoaderConfig(**best), side))
    assert any(said in str(each) for each in found) if said else found == []
