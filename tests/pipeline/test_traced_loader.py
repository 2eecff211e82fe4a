"""The traced loader delivers what the user's own loader would, whatever it is made of (in this process, real workers)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info

from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.burst_loop import BatchShape
from autotune_loader.values.config import LoaderConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]


def take(loader: Any, count: int) -> list[Any]:
    """The first batches, checked for their history; the workers are gone afterwards."""
    iterator = iter(loader)
    batches = []
    for batch, (_worker, start, fetched, collated, cpu_s, samples) in itertools.islice(iterator, count):
        assert start <= fetched <= collated
        assert cpu_s >= 0
        assert samples > 0
        batches.append(batch)
    del iterator
    forget_open_batch()
    return batches


def traced(data: DataSide, workers: int = 0, **config: Any) -> DataLoader[Any]:
    return make_traced_loader(data, LoaderConfig(num_workers=workers, **config), seed=0)


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


def in_order(dataset: Any, batch_size: int | None = 4, **parts: Any) -> DataSide:
    return DataSide.from_loader(DataLoader(dataset, batch_size=batch_size, **parts))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_map_dataset_is_fetched_sample_by_sample_and_starts_over_at_its_end(workers: int) -> None:
    batches = take(traced(in_order(Squares()), workers), 3)

    assert [batch.tolist() for batch in batches] == [[0, 1, 4, 9], [16, 25, 36, 49], [0, 1, 4, 9]]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_with_getitems_is_fetched_by_it(workers: int) -> None:
    assert take(traced(in_order(BatchedSquares()), workers), 1)[0].tolist() == [0, -1, -4, -9]


@pytest.mark.parametrize("workers", WORKERS)
def test_an_iterable_dataset_starts_over_and_fills_its_batches(workers: int) -> None:
    batches = take(traced(in_order(Count()), workers), 3 if workers == 0 else 6)

    firsts = [batch.tolist() for batch in batches[:: workers or 1]]
    assert firsts == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("workers", WORKERS)
def test_any_collate_fn_is_the_users_own(workers: int) -> None:
    def by_hand(samples: list[torch.Tensor]) -> str:
        return "+".join(str(int(sample)) for sample in samples)

    assert take(traced(in_order(Squares(), collate_fn=by_hand), workers), 1) == ["0+1+4+9"]


def test_samplers_and_batch_samplers_choose_the_indices() -> None:
    backwards = in_order(Squares(), sampler=range(7, -1, -1))
    pairs = in_order(Squares(), batch_size=1, batch_sampler=BatchSampler(SequentialSampler(Squares()), 2, False))

    assert take(traced(backwards), 1)[0].tolist() == [49, 36, 25, 16]
    assert [batch.tolist() for batch in take(traced(pairs), 2)] == [[0, 1], [4, 9]]


@pytest.mark.parametrize("dataset", [Squares(), Count()])
def test_without_automatic_batching_samples_come_one_by_one(dataset: Any) -> None:
    assert [int(sample) for sample in take(traced(in_order(dataset, batch_size=None)), 2)] == [0, 1]


def test_drop_last_and_batch_size_of_the_configuration_win() -> None:
    data = in_order(Squares(), batch_size=3)

    assert [len(batch) for batch in take(traced(data), 3)] == [3, 3, 2]
    assert [len(batch) for batch in take(traced(data, drop_last=True), 3)] == [3, 3, 3]
    assert [len(batch) for batch in take(traced(data, batch_size=8), 2)] == [8, 8]


class Point(NamedTuple):
    x: torch.Tensor
    tags: dict[str, Any]


def test_nested_batches_keep_their_types_and_are_weighed() -> None:
    points = [Point(torch.zeros(2), {"name": "a", "y": [torch.ones(3)]}) for _ in range(4)]
    batch = take(traced(in_order(points)), 1)[0]

    assert isinstance(batch, Point)
    assert batch.tags["name"] == ["a"] * 4
    assert BatchShape.of(batch).tensors == 2
    assert BatchShape.of(batch).bytes == 4 * (4 * 2 + 4 * 3)


class Pinnable:
    """A batch type of the user's own, as the PyTorch tutorial has it."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.values = torch.stack(samples)
        self.is_mine = False

    def pin_memory(self) -> Pinnable:
        self.is_mine = True
        return self


def test_a_batch_type_of_the_users_own_is_pinned_by_its_own_method() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    batch, fetch = pin_memory((Pinnable([torch.ones(2)]), (0, 0.0, 1.0, 2.0, 0.5, 1)))

    assert batch.is_mine
    assert list(fetch) == [0, 0.0, 1.0, 2.0, 0.5, 1]
    assert BatchShape.of(batch).bytes == 8


class Shelf(Squares):
    def __init__(self) -> None:
        self.opened_by: int | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.opened_by is not None
        return torch.tensor(self.opened_by)


def open_in_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Shelf)
    assert info.dataset.opened_by is None
    info.dataset.opened_by = worker + 100


@pytest.mark.process
def test_worker_init_fn_reaches_the_users_dataset() -> None:
    batches = take(traced(in_order(Shelf(), worker_init_fn=open_in_worker), workers=2), 2)

    assert [batch[0].item() for batch in batches] == [100, 101]


def test_the_users_dataset_seen_through_the_trace_has_its_class_length_and_attributes() -> None:
    dataset: Any = traced(in_order(Shelf())).dataset
    dataset.opened_by = 7

    assert isinstance(dataset, Shelf)
    assert len(dataset) == 8
    assert dataset.opened_by == 7
    assert not hasattr(dataset, "no_such_thing")


class Dice:
    """A sampler that draws from every generator a sampler might draw from."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        import numpy as np

        for _ in range(16):
            drawn = torch.randint(1000, (), generator=self.generator) + torch.randint(1000, ())
            yield (int(drawn) + random.randrange(1000) + int(np.random.randint(1000))) % 8  # noqa: NPY002


# Rounds that are compared read the same samples, and so find the page cache alike.
@pytest.mark.parametrize("workers", WORKERS)
def test_equal_seeds_give_equal_indices_whatever_the_sampler_draws_from(workers: int) -> None:
    data = DataSide.from_dataset(Squares(), batch_size=8, sampler=Dice())
    runs = [
        [batch.tolist() for batch in take(make_traced_loader(data, LoaderConfig(num_workers=w), seed=seed), 2)]
        for w, seed in ((0, 3), (workers, 3), (0, 4))
    ]

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_shuffled_loaders_own_generator_is_the_one_that_is_seeded() -> None:
    generator = torch.Generator()
    data = DataSide.from_loader(DataLoader(Squares(), batch_size=8, shuffle=True, generator=generator))

    runs = [take(make_traced_loader(data, LoaderConfig(), seed=seed), 1)[0].tolist() for seed in (1, 1, 2)]

    assert runs[0] == runs[1]
    assert sorted(runs[0]) == sorted(runs[2])


def test_an_epoch_without_a_batch_ends_instead_of_turning_for_ever() -> None:
    data = DataSide.from_dataset(Squares(), batch_size=16, drop_last=True)

    assert take(traced(data), 1) == []


class Batch:
    """A batch of a class of its own, as PyG's and torchio's are."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


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


def test_the_size_of_a_batch_is_that_of_its_tensors_whatever_they_are() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert BatchShape.of({"graph": sparse, "y": torch.zeros(2)}).bytes == 16 + 8 + 8
    assert BatchShape.of(Batch(torch.zeros(6, 2))).bytes == 48


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(WholeBatches(), batch_size=4, collate_fn=as_it_is), 4),
        (DataLoader(ListsOfIndices(), sampler=BatchSampler(SequentialSampler(range(8)), 3, True), batch_size=None), 3),
        (DataLoader(ListsOfIndices(), batch_size=None), 5),
        (DataLoader(BatchesOfOwn((torch.zeros(6, 2), torch.zeros(6))), batch_size=None), 6),
        (DataLoader(BatchesOfOwn({"path": "a", "n": torch.tensor(7), "x": torch.zeros(6)}), batch_size=None), 6),
        (DataLoader(BatchesOfOwn(Batch(torch.zeros(6, 2))), batch_size=None, collate_fn=as_it_is), 6),
        (DataLoader(BatchesOfOwn("nobody knows"), batch_size=None), 1),
    ],
)
def test_samples_are_counted_whoever_makes_the_batches(loader: Any, samples: int) -> None:
    traced_loader = make_traced_loader(DataSide.from_loader(loader), LoaderConfig(), seed=0)
    _, fetch = next(iter(traced_loader))
    forget_open_batch()
    assert fetch[5] == samples
