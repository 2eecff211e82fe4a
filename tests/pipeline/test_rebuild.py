"""A loader rebuilt with a configuration is the user's own, whatever class it has."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from autotune_loader.pipeline.build import build_loader, rebuild
from autotune_loader.values.config import LoaderConfig

ROWS = TensorDataset(torch.arange(10))
TUNED = LoaderConfig(num_workers=2, prefetch_factor=3, persistent_workers=True)


class FollowLoader(DataLoader[Any]):
    """As PyTorch Geometric's: it makes its collate function of arguments of its own."""

    def __init__(self, dataset: Any, batch_size: int = 1, follow_batch: Any = None, **kwargs: Any) -> None:
        kwargs.pop("collate_fn", None)
        self.follow_batch = follow_batch
        super().__init__(dataset, batch_size, collate_fn=lambda batch: (follow_batch, len(batch)), **kwargs)


class NeighborLoader(DataLoader[Any]):
    """As PyTorch Geometric's: called with other things than a dataset, and not telling all of them."""

    def __init__(self, data: Any, num_neighbors: int, **kwargs: Any) -> None:
        self.sampler_of_nodes = (data, num_neighbors)
        super().__init__(data, **kwargs)


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


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        (FollowLoader(ROWS, batch_size=4, follow_batch=["x"]), ("follow_batch", ["x"])),
        (NeighborLoader(ROWS, 5, batch_size=4), ("sampler_of_nodes", (ROWS, 5))),
    ],
)
def test_a_class_of_a_library_keeps_its_own_arguments(own: Any, kept: tuple[str, Any]) -> None:
    made = rebuild(own, TUNED)

    assert type(made) is type(own)
    assert getattr(made, kept[0]) == kept[1]
    assert (made.num_workers, made.prefetch_factor, made.persistent_workers, made.batch_size) == (2, 3, True, 4)
    assert (own.num_workers, own.prefetch_factor, own.persistent_workers) == (0, None, False)
    assert len(list(rebuild(own, LoaderConfig()))) == len(own) == 3


def test_a_tuned_batch_size_and_a_batch_sampler_go_where_they_belong() -> None:
    own = NeighborLoader(ROWS, 5, batch_sampler=BatchSampler(SequentialSampler(ROWS), 5, False))
    assert rebuild(own, LoaderConfig()).batch_sampler is own.batch_sampler
    with pytest.raises(ValueError, match="a batch_sampler decides it"):
        rebuild(own, LoaderConfig(batch_size=2))
    sized = rebuild(NeighborLoader(ROWS, 5, batch_size=4), LoaderConfig(batch_size=2))
    assert [len(batch[0]) for batch in sized] == [2] * 5


def test_more_workers_than_cores_were_measured_so_torch_does_not_warn() -> None:
    beyond = len(os.sched_getaffinity(0)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = build_loader([0, 1, 2, 3], LoaderConfig(num_workers=beyond))
    assert loader.num_workers == beyond
