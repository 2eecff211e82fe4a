"""No burst of a run reads what another has read, as long as the dataset lasts, whatever makes the order of samples."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.reading import BLOCK_BATCHES, Reading
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.config import LoaderConfig

ROWS: Any = range(4000)
BURST = 12
"""Batches that one burst takes; ten of them take half of the rows, in batches of 16."""


class InOrder(SequentialSampler):
    """Of the user's own."""


class ByLength(BatchSampler):
    """Batches in the order of their samples' length, as for text."""


def loader(**parts: Any) -> DataSide:
    return DataSide.from_loader(DataLoader(ROWS, **({} if "batch_sampler" in parts else {"batch_size": 16}), **parts))


def burst(data: DataSide, reading: Reading, batches: int = BURST, **config: Any) -> list[Any]:
    """What one burst reads, batch by batch."""
    iterator = iter(make_traced_loader(data, LoaderConfig(**config), reading))
    read = [torch.as_tensor(batch).tolist() for batch, _ in itertools.islice(iterator, batches)]
    forget_open_batch()
    return read


LOADERS = {
    "in order": loader(),
    "shuffled": loader(shuffle=True),
    "shuffled by a generator": loader(shuffle=True, generator=torch.Generator().manual_seed(7)),
    "a rank's": loader(sampler=DistributedSampler(ROWS, num_replicas=2, rank=1)),
    "a subset": loader(sampler=SubsetRandomSampler(range(0, 4000, 1))),
    "an order of one's own": loader(sampler=InOrder(ROWS)),
    "batches by length": loader(batch_sampler=ByLength(SequentialSampler(ROWS), 16, True)),
    "one by one": DataSide.from_loader(DataLoader(ROWS, batch_size=None)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_bursts_read_what_none_before_has_read(name: str) -> None:
    data, reading = LOADERS[name], Reading(LOADERS[name])
    bursts = 4 if name == "a rank's" else 10  # it has half of the rows
    samples = np.hstack([np.ravel(batch) for _ in range(bursts) for batch in burst(data, reading)])
    assert len(set(samples.tolist())) == len(samples) == bursts * BURST * (16 if data.is_batched else 1)


@pytest.mark.parametrize("shuffled", [False, True])
def test_all_is_read_before_anything_is_read_twice(shuffled: bool) -> None:
    # GIVEN a dataset of 63 batches, the last of 8 samples, and bursts of 12 batches
    rows: Any = range(1000)
    data = DataSide.from_loader(DataLoader(rows, batch_size=16, shuffle=shuffled))
    reading = Reading(data)
    batches = [batch for _ in range(6) for batch in burst(data, reading)]
    # THEN the first 1,000 samples are all of them, in another order, and only the end of an epoch has a smaller batch
    read = list(itertools.chain(*batches))[:1000]
    assert read != sorted(read) == list(rows)
    assert [number for number, batch in enumerate(batches) if len(batch) != 16] == [62]
    # AND batches of other sizes read no sample twice either, and begin where batches do
    reading = Reading(data)
    sized = [burst(data, reading, 5, batch_size=size) for size in (None, 1, 24, None, 7)]
    read = list(itertools.chain(*itertools.chain(*sized)))
    assert len(set(read)) == len(read)
    assert shuffled or [each[0][0] % 16 for each in sized[:1] + sized[3:4]] == [0, 0]


def test_a_small_dataset_is_read_as_training_reads_it_and_then_again() -> None:
    data = DataSide.from_loader(DataLoader([1, 2, 3, 4, 5], batch_size=2))  # type: ignore[arg-type]
    reading = Reading(data)
    assert [burst(data, reading, 2), burst(data, reading, 4)] == [[[1, 2], [3, 4]], [[5], [1, 2], [3, 4], [5]]]
    dropped = DataSide.from_loader(DataLoader([1, 2, 3], batch_size=2, drop_last=True))  # type: ignore[arg-type]
    assert burst(dropped, Reading(dropped), 3) == [[1, 2]] * 3


@pytest.mark.parametrize("name", ["in order", "an order of one's own", "batches by length"])
def test_bursts_are_spread_over_an_epoch_whose_order_follows_the_length(name: str) -> None:
    data, reading = LOADERS[name], Reading(LOADERS[name])
    bursts = [burst(data, reading) for _ in range(8)]
    means = [fmean(index for batch in each for index in batch) / len(ROWS) for each in bursts]
    # THEN together they are the middle of the epoch; where the order is torch's, each of them is
    assert fmean(means) == pytest.approx(0.5, abs=0.1)
    if name == "in order":
        assert means == pytest.approx([0.5] * 8, abs=0.2)
        # AND some batches follow each other, for a disk that reads ahead
        ahead = [after[0] == before[-1] + 1 for before, after in itertools.pairwise(bursts[0])]
        assert ahead == [number % BLOCK_BATCHES != 0 for number in range(1, BURST)]


def test_a_probe_that_had_to_be_started_anew_begins_elsewhere() -> None:
    rows: Any = range(100_000)
    for shuffled in (False, True):
        data = DataSide.from_loader(DataLoader(rows, batch_size=16, shuffle=shuffled))
        first, second = (burst(data, Reading(data, seed)) for seed in (0, 5))
        assert not set(itertools.chain(*first)) & set(itertools.chain(*second))


class Broken:
    def __iter__(self) -> Iterator[int]:
        yield from range(16)
        raise LookupError("no more")


class Drawing:
    """A sampler that draws from every generator a sampler might draw from."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        for _ in range(16):
            drawn = torch.randint(1000, (), generator=self.generator) + torch.randint(1000, ())
            yield (int(drawn) + random.randrange(1000) + int(np.random.randint(1000))) % 8  # noqa: NPY002


def test_a_sampler_that_draws_gives_a_run_the_same_samples_in_each_process_and_ends_where_it_is_empty() -> None:
    drawing = DataSide.from_loader(DataLoader(ROWS, batch_size=8, sampler=Drawing()))
    assert burst(drawing, Reading(drawing), 2) == burst(drawing, Reading(drawing), 2)
    assert burst(drawing, Reading(drawing), 2) != burst(drawing, Reading(drawing, 1), 2)
    empty, broken = (loader(sampler=sampler) for sampler in ([], Broken()))
    reading = Reading(broken)
    for _ in range(2):
        with pytest.raises(LookupError, match="no more"):
            burst(broken, reading)
    assert burst(empty, Reading(empty)) == []
    replaced = WeightedRandomSampler([1.0] * 4000, 4000)
    for sampler in (replaced, RandomSampler(ROWS, replacement=True)):
        data = loader(sampler=sampler)
        reading = Reading(data)
        assert burst(data, reading) != burst(data, reading)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randint(1 << 30, (64,)))


class StreamOfEpochs(Stream):
    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]


def test_a_stream_has_another_seed_and_epoch_in_each_burst_and_it_is_said_where_that_may_not_help() -> None:
    plain, told = (DataSide.from_loader(DataLoader(each, batch_size=16)) for each in (Stream(), StreamOfEpochs()))
    for data in (plain, told):
        reading = Reading(data)
        assert burst(data, reading, 4) != burst(data, reading, 4)
    assert told.dataset.epochs == [1, 2]
    assert (Reading(told).note, Reading(LOADERS["in order"]).note) == (None, None)
    assert "which every burst begins anew" in (Reading(plain).note or "")
