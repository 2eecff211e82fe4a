"""A loader rebuilt with a configuration is the user's own, whatever class it has."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.pipeline.build import rebuild
from autotune_loader.values.config import LoaderConfig

ROWS = TensorDataset(torch.arange(10))
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
    own = EndlessLoader(ROWS, batch_size=4)
    made = rebuild(own, LoaderConfig())
    assert [batch[0].tolist() for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert next(iter(own))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error:This DataLoader will create")  # more workers than cores were measured
def test_a_class_of_a_library_keeps_its_own_arguments_and_the_users_loader_its_settings() -> None:
    own = NeighborLoader(ROWS, 5, batch_size=4)
    made = rebuild(own, TUNED)
    assert type(made) is NeighborLoader
    assert (made.num_workers, made.prefetch_factor, made.persistent_workers, made.batch_size) == (MORE, 3, True, 4)
    assert (own.num_workers, own.prefetch_factor, own.persistent_workers) == (0, None, False)
    assert list(rebuild(own, LoaderConfig())) == list(own) == [(5, 4), (5, 4), (5, 2)]
