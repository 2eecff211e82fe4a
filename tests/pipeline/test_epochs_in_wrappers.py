"""Datasets that are told the epoch, wherever in a wrapper they hide: persistent workers would never hear of the next."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from autotune_loader.pipeline.workload import DataSide, wrapped_datasets

PLAIN = TensorDataset(torch.zeros(8))


class TellsEpoch(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None: ...


class KeepsEpoch(Dataset[Any]):
    current_epoch = 0

    def __len__(self) -> int:
        return 8


class Stream(IterableDataset[Any]):
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Wrapper:
    """No Dataset of torch's, as users write them."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def has_epochs(dataset: Any) -> bool:
    return DataSide(dataset=dataset, batch_size=2).has_epochs


@pytest.mark.parametrize(
    "dataset",
    [
        TellsEpoch(),
        KeepsEpoch(),
        Subset(TellsEpoch(), [0, 1]),
        ConcatDataset([PLAIN, KeepsEpoch()]),
        ChainDataset([Stream()]),
        Subset(ConcatDataset([PLAIN, Subset(TellsEpoch(), [0])]), [0]),
        Wrapper(dataset=SimpleNamespace(epoch=1)),
        Wrapper(base=TellsEpoch()),
        Wrapper(by_name={"a": PLAIN, "b": TellsEpoch()}),
        Wrapper(transform=SimpleNamespace(set_epoch=print)),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_dataset_that_is_told_the_epoch_is_found_in_its_wrappers(dataset: Any) -> None:
    assert has_epochs(dataset)


@pytest.mark.parametrize(
    "dataset",
    [PLAIN, Subset(PLAIN, [0]), ConcatDataset([PLAIN, PLAIN]), [1, 2, 3], Wrapper(dataset=PLAIN, epochs=90)],
    ids=lambda dataset: type(dataset).__name__,
)
def test_other_datasets_have_no_epochs(dataset: Any) -> None:
    assert not has_epochs(dataset)


def test_a_wrapper_that_holds_itself_is_looked_at_once() -> None:
    wrapper = Wrapper(base=PLAIN)
    wrapper.dataset = wrapper

    assert list(wrapped_datasets(wrapper)) == [wrapper, PLAIN]
