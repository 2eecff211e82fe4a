"""The traced loader delivers what the user's own loader would, whatever it is made of (in this process, real workers)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.burst_loop import BatchShape
from autotune_loader.values.config import LoaderConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]


def take(data: Any, count: int, workers: int = 0, seed: int = 0, **config: Any) -> list[Any]:
    """The first batches, checked for their history; the workers are gone afterwards."""
    side = data if isinstance(data, DataSide) else DataSide.from_loader(data)
    iterator = iter(make_traced_loader(side, LoaderConfig(num_workers=workers, **config), seed=seed))
    batches = []
    for batch, (_worker, start, fetched, collated, cpu_s, samples) in itertools.islice(iterator, count):
        assert start <= fetched <= collated
        assert cpu_s >= 0
        assert samples > 0
        batches.append(batch)
    del iterator
    forget_open_batch()
    return batches


def listed(batches: list[Any]) -> list[Any]:
    return [batch.tolist() for batch in batches]


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


@pytest.mark.parametrize("workers", WORKERS)
def test_each_kind_of_dataset_is_fetched_in_its_own_way_and_starts_over_at_its_end(workers: int) -> None:
    each = workers or 1  # every worker delivers all of a stream
    assert listed(take(DataLoader(Squares(), batch_size=4), 3, workers)) == [
        [0, 1, 4, 9],
        [16, 25, 36, 49],
        [0, 1, 4, 9],
    ]
    assert listed(take(DataLoader(BatchedSquares(), batch_size=4), 1, workers)) == [[0, -1, -4, -9]]
    stream = take(DataLoader(Count(), batch_size=4), 3 * each, workers)
    assert listed(stream[::each]) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert take(DataLoader(Squares(), batch_size=4, collate_fn=by_hand), 1, workers) == ["0+1+4+9"]


def test_samplers_and_batch_samplers_choose_the_indices() -> None:
    pairs = BatchSampler(SequentialSampler(Squares()), 2, False)

    assert listed(take(DataLoader(Squares(), batch_size=4, sampler=range(7, -1, -1)), 1)) == [[49, 36, 25, 16]]
    assert listed(take(DataLoader(Squares(), batch_sampler=pairs), 2)) == [[0, 1], [4, 9]]


@pytest.mark.parametrize("dataset", [Squares(), Count()])
def test_without_automatic_batching_samples_come_one_by_one(dataset: Any) -> None:
    assert [int(sample) for sample in take(DataLoader(dataset, batch_size=None), 2)] == [0, 1]


def test_drop_last_and_batch_size_of_the_configuration_win() -> None:
    loader = DataLoader(Squares(), batch_size=3)

    assert [len(batch) for batch in take(loader, 3)] == [3, 3, 2]
    assert [len(batch) for batch in take(loader, 3, drop_last=True)] == [3, 3, 3]
    assert [len(batch) for batch in take(loader, 2, batch_size=8)] == [8, 8]


class Point(NamedTuple):
    x: torch.Tensor
    tags: dict[str, Any]


class Pinnable:
    """A batch type of the user's own, as the PyTorch tutorial has it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.is_mine = False

    def pin_memory(self) -> Pinnable:
        self.is_mine = True
        return self


def test_nested_batches_keep_their_types_and_are_weighed() -> None:
    points = [Point(torch.zeros(2), {"name": "a", "y": [torch.ones(3)]}) for _ in range(4)]
    (batch,) = take(DataLoader(points, batch_size=4), 1)
    assert isinstance(batch, Point)
    assert batch.tags["name"] == ["a"] * 4
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)

    for each, size in (
        (batch, 4 * (4 * 2 + 4 * 3)),
        ({"graph": sparse, "y": torch.zeros(2)}, 16 + 8 + 8),
        (Pinnable(torch.zeros(6, 2)), 48),
    ):
        assert BatchShape.of(each).bytes == size


def test_a_batch_type_of_the_users_own_is_pinned_by_its_own_method() -> None:
    batch, fetch = pin_memory((Pinnable(torch.ones(2)), (0, 0.0, 1.0, 2.0, 0.5, 1)))

    assert batch.is_mine
    assert list(fetch) == [0, 0.0, 1.0, 2.0, 0.5, 1]


class Shelf(Squares):
    opened_by: int | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.opened_by is not None
        return torch.tensor(self.opened_by)


def open_in_worker(worker: int) -> None:
    info: Any = get_worker_info()
    assert isinstance(info.dataset, Shelf)
    assert info.dataset.opened_by is None
    info.dataset.opened_by = worker + 100


@pytest.mark.process
def test_worker_init_fn_reaches_the_users_dataset() -> None:
    batches = take(DataLoader(Shelf(), batch_size=4, worker_init_fn=open_in_worker), 2, workers=2)

    assert [batch[0].item() for batch in batches] == [100, 101]


class Dice:
    """A sampler that draws from every generator a sampler might draw from."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        for _ in range(16):
            drawn = torch.randint(1000, (), generator=self.generator) + torch.randint(1000, ())
            yield (int(drawn) + random.randrange(1000) + int(np.random.randint(1000))) % 8  # noqa: NPY002


# Rounds that are compared read the same samples, and so find the page cache alike.
@pytest.mark.parametrize("workers", WORKERS)
def test_equal_seeds_give_equal_indices_whatever_the_sampler_draws_from(workers: int) -> None:
    own = DataLoader(Squares(), batch_size=8, shuffle=True, generator=torch.Generator())
    for data in (DataSide.from_dataset(Squares(), batch_size=8, sampler=Dice()), own):
        runs = [listed(take(data, 2, each, seed)) for each, seed in ((0, 3), (workers, 3), (0, 4))]

        assert runs[0] == runs[1]
        assert runs[0] != runs[2]


def test_an_epoch_without_a_batch_ends_instead_of_turning_for_ever() -> None:
    assert take(DataSide.from_dataset(Squares(), batch_size=16, drop_last=True), 1) == []


class WholeBatches(Squares):
    """Its `__getitems__` returns a batch that is ready, as tensordict's does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices), "y": torch.tensor(indices), "z": torch.tensor(indices)}


class ListsOfIndices(Squares):
    def __getitem__(self, index: Any) -> Any:
        return {"x": 0.5} if isinstance(index, list) else torch.zeros(5, 2)


class BatchesOfOwn(IterableDataset[Any]):
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * 3)


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(WholeBatches(), batch_size=4, collate_fn=as_it_is), 4),
        (DataLoader(ListsOfIndices(), sampler=BatchSampler(SequentialSampler(range(8)), 3, True), batch_size=None), 3),
        (DataLoader(ListsOfIndices(), batch_size=None), 5),
        (DataLoader(BatchesOfOwn({"path": "a", "n": torch.tensor(7), "x": torch.zeros(6)}), batch_size=None), 6),
        (DataLoader(BatchesOfOwn(Pinnable(torch.zeros(6, 2))), batch_size=None, collate_fn=as_it_is), 6),
        (DataLoader(BatchesOfOwn("nobody knows"), batch_size=None), 1),
    ],
)
def test_samples_are_counted_whoever_makes_the_batches(loader: Any, samples: int) -> None:
    traced_loader = make_traced_loader(DataSide.from_loader(loader), LoaderConfig(), seed=0)
    _, fetch = next(iter(traced_loader))
    forget_open_batch()
    assert fetch[5] == samples
