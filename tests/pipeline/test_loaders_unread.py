"""What is seen of a loader that is not read: epochs its dataset is told of, its name, and another one like it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from autotune_loader.pipeline.build import rebuild
from autotune_loader.pipeline.site import Site
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import Line

PLAIN = TensorDataset(torch.zeros(8))
BATCHES = BatchSampler(RandomSampler(PLAIN), 8, True)
LINE = Line("/job/train.py", 41)


class Holding:
    """No Dataset of torch's, as users write them."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class TellsEpoch(Holding):
    def set_epoch(self, epoch: int) -> None: ...


class Stream(IterableDataset[Any]):
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(8)

    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


def around_itself(**held: Any) -> Holding:
    wrapper = Holding(base=PLAIN, **held)
    wrapper.dataset = wrapper
    return wrapper


@pytest.mark.parametrize(
    ("dataset", "has_epochs"),
    [
        (Holding(current_epoch=0), True),
        (Subset(ConcatDataset([PLAIN, Subset(TellsEpoch(), [0])]), [0]), True),
        (ChainDataset([Stream()]), True),
        (Holding(dataset=SimpleNamespace(epoch=1)), True),
        (Holding(by_name={"a": PLAIN, "b": TellsEpoch()}), True),
        (around_itself(transform=SimpleNamespace(set_epoch=print)), True),
        (around_itself(epochs=90), False),
        ([1, 2, 3], False),
    ],
)
def test_a_dataset_that_is_told_the_epoch_is_found_in_its_wrappers(dataset: Any, has_epochs: bool) -> None:
    """Persistent workers would never hear of the next."""
    assert DataSide(dataset=dataset, batch_size=2).has_epochs is has_epochs


@pytest.mark.parametrize(
    ("loader", "contents"),
    [
        (DataLoader(PLAIN, batch_size=4, shuffle=True), "TensorDataset[8], batches of 4, shuffled"),
        (DataLoader(PLAIN, batch_sampler=BATCHES), "TensorDataset[8], batches of 8, shuffled"),
        (DataLoader(PLAIN, batch_size=None), "TensorDataset[8]"),
        (DataLoader(Stream()), "Stream, batches of 1"),
    ],
)
def test_a_site_says_what_its_loader_reads(loader: Any, contents: str) -> None:
    assert Site.of(loader, LINE).contents == contents


def test_loaders_made_anew_are_one_by_line_and_contents() -> None:
    def site(batch_size: int = 4, line: Line = LINE) -> Site:
        return Site.of(DataLoader(TensorDataset(torch.rand(16)), batch_size=batch_size), line)

    assert site() == site()
    assert site() not in (site(batch_size=8), site(line=Line("/job/train.py", 42)))


TEN = TensorDataset(torch.arange(10))
MORE = (os.cpu_count() or 1) + 1
"""Workers than cores."""
TUNED = LoaderConfig(num_workers=MORE, prefetch_factor=3, persistent_workers=True)


class NeighborLoader(DataLoader[Any]):
    """As PyTorch Geometric's: called with other things than a dataset, and making its collate function of one of them."""

    def __init__(self, data: Any, num_neighbors: int, **kwargs: Any) -> None:
        super().__init__(data, collate_fn=lambda batch: (num_neighbors, len(batch)), **kwargs)


class Repeated:
    """A sampler of batches that never ends."""

    def __init__(self, batches: Any) -> None:
        self.sampler = batches

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


class EndlessLoader(DataLoader[Any]):
    """As timm's and ultralytics': it passes all arguments on, and keeps one iterator for all epochs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


def test_a_loader_that_is_running_is_not_shared() -> None:
    own = EndlessLoader(TEN, batch_size=4)
    made = rebuild(own, LoaderConfig())
    assert [batch[0].tolist() for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert next(iter(own))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error:This DataLoader will create")  # more workers than cores were measured
def test_a_class_of_a_library_keeps_its_own_arguments_and_the_users_loader_its_settings() -> None:
    own = NeighborLoader(TEN, 5, batch_size=4)
    made = rebuild(own, TUNED)
    assert type(made) is NeighborLoader
    assert (made.num_workers, made.prefetch_factor, made.persistent_workers, made.batch_size) == (MORE, 3, True, 4)
    assert (own.num_workers, own.prefetch_factor, own.persistent_workers) == (0, None, False)
    assert list(rebuild(own, LoaderConfig())) == list(own) == [(5, 4), (5, 4), (5, 2)]
