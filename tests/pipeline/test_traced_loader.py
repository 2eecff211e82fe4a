"""The traced loader delivers what the user's own loader would, whatever it is made of (in this process, real workers)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.config import LoaderConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]


def take(data: Any, count: int, workers: int = 0, **config: Any) -> list[Any]:
    """The first batches, checked for their history; the workers are gone afterwards."""
    side = data if isinstance(data, DataSide) else DataSide.from_loader(data)
    iterator = iter(make_traced_loader(side, LoaderConfig(num_workers=workers, **config), Reading(side)))
    batches = []
    for batch, (_worker, start, fetched, collated, cpu_s, samples, _report) in itertools.islice(iterator, count):
        assert start <= fetched <= collated
        assert cpu_s >= 0
        assert samples > 0
        batches.append(batch)
    del iterator
    forget_open_batch()
    return batches


def listed(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


class BatchedSquares(Squares):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(-(index**2)) for index in indices]


class Count(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def by_hand(samples: list[torch.Tensor]) -> str:
    return "+".join(str(int(sample)) for sample in samples)


LOADERS = (
    DataLoader(Squares(), batch_size=3),
    DataLoader(BatchedSquares(), batch_size=4),
    DataLoader(Squares(), batch_size=4, collate_fn=by_hand),
    DataLoader(Squares(), batch_size=4, sampler=range(7, -1, -1)),
    DataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(Squares()), 2, False)),
    DataLoader(Squares(), batch_size=None),
)


@pytest.mark.parametrize("workers", WORKERS)
def test_batches_are_the_users_own_and_begin_again_at_their_end(workers: int) -> None:
    for loader in LOADERS:
        own = listed(loader)
        assert listed(take(loader, 2 * len(own), workers)) == own * 2
    each = workers or 1  # every worker delivers all of a stream
    stream = take(DataLoader(Count(), batch_size=4), 3 * each, workers)
    assert listed(stream[::each]) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def test_a_tuned_batch_size_wins_and_an_epoch_without_a_batch_ends() -> None:
    loader = DataLoader(Squares(), batch_size=3, drop_last=True)
    assert [len(batch) for batch in take(loader, 3)] == [3, 3, 3]
    assert [len(batch) for batch in take(loader, 2, batch_size=8)] == [8, 8]
    assert take(loader, 1, batch_size=16) == []


class Point(NamedTuple):
    x: torch.Tensor
    tags: dict[str, Any]


class Own:
    """A batch type of the user's own."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class WholeBatches(Squares):
    """Its `__getitems__` returns a batch that is ready, as tensordict's does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices), "y": torch.tensor(indices), "z": torch.tensor(indices)}


class ListsOfIndices(Squares):
    def __getitem__(self, index: Any) -> Any:
        return {"x": 0.5} if isinstance(index, list) else torch.zeros(5, 2)


def as_it_is(batch: Any) -> Any:
    return batch


def stream_of(batch: Any) -> Any:
    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([batch] * 3)

    return DataLoader(Batches(), batch_size=None, collate_fn=as_it_is)


POINTS: Any = [Point(torch.zeros(2), {"name": "a", "y": [torch.ones(3)]})] * 4
SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
ROWS_OF_INDICES = BatchSampler(SequentialSampler(range(8)), 3, True)


@pytest.mark.parametrize(
    ("loader", "samples", "size"),
    [
        (DataLoader(POINTS, batch_size=4), 4, 4 * (4 * 2 + 4 * 3)),
        (DataLoader(WholeBatches(), batch_size=4, collate_fn=as_it_is), 4, 3 * 4 * 8),
        (DataLoader(ListsOfIndices(), sampler=ROWS_OF_INDICES, batch_size=None), 3, 0),
        (DataLoader(ListsOfIndices(), batch_size=None), 5, 5 * 2 * 4),
        (stream_of({"path": "a", "n": torch.tensor(7), "x": torch.zeros(6)}), 6, 8 + 6 * 4),
        (stream_of({"graph": SPARSE, "y": torch.zeros(2)}), 3, 16 + 8 + 8),
        (stream_of(Own(torch.zeros(6, 2))), 6, 48),
        (stream_of("nobody knows"), 1, 0),
    ],
)
def test_samples_are_counted_and_weighed_whoever_makes_the_batches(loader: Any, samples: int, size: int) -> None:
    data = DataSide.from_loader(loader)
    batch, fetch = next(iter(make_traced_loader(data, LoaderConfig(), Reading(data))))
    forget_open_batch()
    assert (fetch[5], BatchShape.of(batch).bytes) == (samples, size)
    assert isinstance(batch, Point) == (loader.dataset is POINTS)
