"""What `allow=` opens for each kind of workload, why there may be nothing to open, and what a choice means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.report.semantics import consequences, unmet
from autotune_loader.tuning.state import batch_sizes, drop_lasts, start_methods
from autotune_loader.values.config import LoaderConfig


def rows(length: int) -> TensorDataset:
    return TensorDataset(torch.zeros(length, 3))


def data(length: int = 100, batch_size: int | None = 8, **parts: Any) -> DataSide:
    return DataSide.from_dataset(rows(length), batch_size=batch_size, **parts)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(100))


class Stamped(TensorDataset):
    epoch = 0


def own_batches() -> BatchSampler:
    return BatchSampler(SequentialSampler(rows(100)), 8, False)


@pytest.mark.parametrize(
    ("side", "sizes"),
    [
        (data(), (None, 16, 32, 4)),
        (data(length=20), (None, 16, 4)),
        (data(batch_size=1), (None, 2, 4)),
        (data(batch_size=None), (None,)),
        (data(batch_size=None, batch_sampler=own_batches()), (None,)),
        (DataSide.from_dataset(Stream(), batch_size=8), (None, 16, 32, 4)),
    ],
    ids=["map-style", "a small epoch", "single samples", "no batches", "own batches", "a stream"],
)
def test_batch_sizes_are_powers_of_two_around_the_users_own(side: DataSide, sizes: tuple[int | None, ...]) -> None:
    assert batch_sizes(side, {"batch_size"}) == sizes
    assert batch_sizes(side, set()) == (None,)


@pytest.mark.parametrize(
    ("side", "why"),
    [
        (data(length=100, batch_size=8), None),
        (data(length=96, batch_size=8), "every batch of an epoch is full"),
        (data(length=5, batch_size=8), "only one of an epoch"),
        (data(drop_last=True), "True already"),
        (data(batch_size=None, batch_sampler=own_batches()), "not made by the DataLoader"),
        (DataSide.from_dataset(Stream(), batch_size=8), "shows in no burst"),
    ],
    ids=["short last", "full last", "only one", "dropped already", "own batches", "a stream"],
)
def test_drop_last_is_searched_only_where_a_short_batch_costs_something(side: DataSide, why: str | None) -> None:
    space = Space(max_workers=1)
    assert drop_lasts(side, {"drop_last"}) == ((None, True) if why is None else (None,))
    assert drop_lasts(side, set()) == (None,)
    said = unmet(side, {"drop_last"}, space)
    assert (said == []) if why is None else (why in said[0])
    assert unmet(side, set(), space) == []


@pytest.mark.parametrize(
    ("side", "why"),
    [
        (data(batch_size=None, batch_sampler=own_batches()), "a batch_sampler makes the batches"),
        (data(batch_size=None), "batch_size=None leaves the batches to the dataset"),
        (data(length=1, batch_size=1), "an epoch of 1 samples has room for no other than 1"),
    ],
    ids=["own batches", "no batches", "one sample"],
)
def test_why_the_batch_size_cannot_be_tuned_is_said(side: DataSide, why: str) -> None:
    (said,) = unmet(side, {"batch_size"}, Space(max_workers=1, batch_sizes=batch_sizes(side, {"batch_size"})))
    assert said.startswith("batch_size is not tuned: ")
    assert why in said


@pytest.mark.parametrize("own", [None, "spawn", "fork"])
def test_start_methods_are_the_users_own_and_the_others(own: str | None) -> None:
    loader = DataLoader(rows(8), num_workers=1, multiprocessing_context=own)
    config = LoaderConfig.from_loader(loader) if own else None
    workload = Workload(data=data(), training=TrainingSide(), own_config=config)
    assert start_methods(workload, set()) == (own,)
    found = start_methods(workload, {"multiprocessing_context"})
    assert found[0] == own
    assert set(found[1:]) == {"fork", "forkserver"} - {own or start_method()}


@pytest.mark.parametrize(
    ("best", "side", "said"),
    [
        (LoaderConfig(batch_size=32), data(), "from 8 to 32: the learning rate"),
        (LoaderConfig(batch_size=32), data(), "4 times the learning rate is a common start for SGD, 2 times for Adam"),
        (LoaderConfig(drop_last=True), data(length=100), "leaves out the last 4 samples of every epoch"),
        (LoaderConfig(drop_last=True, batch_size=32), data(length=100), "the last 4 samples"),
        (LoaderConfig(num_workers=1, in_order=False), data(), "order differs from run to run"),
        (LoaderConfig(sharing_strategy="file_system"), data(), "config.apply()"),
        (LoaderConfig(num_workers=1, multiprocessing_context="fork"), data(), "may hang in forked workers"),
        (
            LoaderConfig(num_workers=1, persistent_workers=True),
            DataSide.from_dataset(Stamped(torch.zeros(9)), batch_size=3),
            "set_epoch()",
        ),
    ],
    ids=lambda value: None if isinstance(value, DataSide) else str(value),
)
def test_what_a_choice_changes_in_training_is_said(best: LoaderConfig, side: DataSide, said: str) -> None:
    assert any(said in sentence for sentence in consequences(best, side))


def test_a_choice_that_changes_nothing_in_training_has_no_consequences() -> None:
    assert consequences(LoaderConfig(num_workers=4, persistent_workers=True, consumer_threads=2), data()) == []
