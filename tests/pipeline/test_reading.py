"""No burst of a run reads what another has read, as long as the dataset lasts, whatever makes the order of samples."""

import itertools
import random
import sys
import tracemalloc

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
)

from autotune_loader.pipeline.reading import BLOCK_BATCHES, SIDES_APART, Reading
from autotune_loader.pipeline.tracing import forget_open_batch, make_traced_loader
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig

ROWS = range(4000)
BURST = 12
"""Batches that one burst takes; eight of them take 1,536 rows, in batches of 16."""


class InOrder(SequentialSampler):
    """Of the user's own."""


def loader(dataset=ROWS, **parts):
    return DataSide.from_loader(
        DataLoader(dataset, **({} if "batch_sampler" in parts else {"batch_size": 16}) | parts)
    )


class Run:
    """The bursts of one run; each call is one, and gives what it reads, batch by batch."""

    def __init__(self, data, seed=0):
        self.data, self.reading = data, Reading(data, seed)

    def __call__(self, batches=BURST, **config):
        iterator = iter(make_traced_loader(self.data, LoaderConfig(**config), self.reading))
        read = [
            torch.as_tensor(handed.batch).tolist() for handed in itertools.islice(iterator, batches)
        ]
        forget_open_batch()
        return read


LOADERS = {
    "in order": loader(),
    "shuffled": loader(shuffle=True),
    "shuffled by a generator": loader(shuffle=True, generator=torch.Generator().manual_seed(7)),
    "a rank's": loader(sampler=DistributedSampler(ROWS, num_replicas=2, rank=1)),
    "a subset": loader(sampler=SubsetRandomSampler(ROWS)),
    "an order of one's own": loader(sampler=InOrder(ROWS)),
    "batches by length": loader(batch_sampler=BatchSampler(SequentialSampler(ROWS), 16, True)),
    "one by one": loader(batch_size=None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_bursts_read_what_none_before_has_read_and_are_spread_over_an_epoch(name):
    burst = Run(LOADERS[name])
    bursts = [burst() for _ in range(4 if name == "a rank's" else 8)]  # it has half of the rows
    samples = np.hstack([np.ravel(batch) for each in bursts for batch in each])
    assert (
        len(set(samples.tolist()))
        == len(samples)
        == len(bursts) * BURST * (1 if name == "one by one" else 16)
    )
    if name in ("in order", "an order of one's own", "batches by length"):
        # THEN together they are the middle of the epoch, whose order may follow the length
        assert samples.mean() / len(ROWS) == pytest.approx(0.5, abs=0.1)
    if name == "in order":
        # AND where the order is torch's, each of them is, with some batches after each other, for a disk that reads ahead
        assert [np.mean(each) / len(ROWS) for each in bursts] == pytest.approx([0.5] * 8, abs=0.2)
        ahead = [after[0] == before[-1] + 1 for before, after in itertools.pairwise(bursts[0])]
        assert ahead == [number % BLOCK_BATCHES != 0 for number in range(1, BURST)]


@pytest.mark.parametrize("name", LOADERS)
def test_sides_of_a_comparison_read_far_from_each_other_and_the_same_at_a_place_that_they_are_told(
    name,
):
    # GIVEN one side whose sampler, if it is the user's, goes on in this process, and two others
    sides = [Run(LOADERS[name], 1 + number * SIDES_APART) for number in range(3)]
    read = [np.hstack([np.ravel(batch) for _ in range(2) for batch in side()]) for side in sides]
    assert len(set(np.hstack(read).tolist())) == sum(map(len, read))
    if not LOADERS[name].has_own_order:
        # WHEN all shall read the same THEN they do, and each goes on where it was
        before = [side.reading.place for side in sides]
        for side in sides:
            side.reading.go_on(5)
        one, *others = (side() for side in sides)
        assert [one] * 2 == others
        for side, place in zip(sides, before, strict=True):
            side.reading.go_on(place)
        further = np.hstack([np.ravel(batch) for side in sides for batch in side(3)])
        assert not set(further.tolist()).intersection(np.hstack(read).tolist())


@pytest.mark.parametrize("seed", [0, 1, 33, 1 + SIDES_APART])
@pytest.mark.parametrize("shuffled", [False, True])
def test_wherever_a_reading_begins_all_is_read_before_anything_is_read_twice(shuffled, seed):
    burst = Run(loader(range(1000), shuffle=shuffled), seed)
    first, second = ([index for batch in burst(63) for index in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert (first != second) == shuffled


@pytest.mark.parametrize("shuffled", [False, True])
def test_all_is_read_before_anything_is_read_twice(shuffled):
    # GIVEN a dataset of 63 batches, the last of 8 samples, and bursts of 12 batches
    data = loader(range(1000), shuffle=shuffled)
    burst = Run(data)
    batches = [batch for _ in range(6) for batch in burst()]
    # THEN the first 1,000 samples are all of them, in another order, and only the end of an epoch has a smaller batch
    read = list(itertools.chain(*batches))[:1000]
    assert read != sorted(read) == list(range(1000))
    assert [number for number, batch in enumerate(batches) if len(batch) != 16] == [62]
    assert (batches[63:] != batches[:9]) == shuffled
    # AND batches of other sizes read no sample twice either, and begin where batches do
    burst = Run(data)
    sized = [burst(5, batch_size=size) for size in (None, 1, 24, None, 7)]
    read = list(itertools.chain(*itertools.chain(*sized)))
    assert len(set(read)) == len(read)
    assert shuffled or [each[0][0] % 16 for each in sized[:1] + sized[3:4]] == [0, 0]


def test_a_small_dataset_is_read_as_training_reads_it_and_then_again():
    burst = Run(loader([1, 2, 3, 4, 5], batch_size=2))
    assert [burst(2), burst(4)] == [[[1, 2], [3, 4]], [[5], [1, 2], [3, 4], [5]]]
    for size, batches in ((2, [[1, 2]] * 3), (3, [[1, 2, 3]] * 3), (4, [])):
        assert Run(loader([1, 2, 3], batch_size=2, drop_last=True))(3, batch_size=size) == batches


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataset_may_say_that_it_is_longer_than_memory_and_a_probe_that_is_started_anew_begins_elsewhere(
    shuffled,
):
    """It draws a crop for any index."""
    data = loader(range(sys.maxsize), shuffle=shuffled)
    tracemalloc.start()
    samples, others = (list(itertools.chain(*Run(data, seed)(100))) for seed in (0, 5))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert len({*samples, *others}) == 2 * len(samples) == 3200
    assert np.ptp(samples) > 1 << 30


def by_shard(shards, samples, is_shuffled=True, mixed=1):
    """Indices of shards in random order, `mixed` of them at a time, shuffled within."""
    drawing = random.Random(0)
    numbers, indices = drawing.sample(range(shards), shards), []
    for at in range(0, shards, mixed):
        within = [
            number * samples + place
            for number in numbers[at : at + mixed]
            for place in range(samples)
        ]
        indices += drawing.sample(within, len(within)) if is_shuffled else within
    return indices


def as_batches(indices, size=16):
    return [indices[at : at + size] for at in range(0, len(indices), size)]


RUNS = {
    "shuffled within shards": ({"sampler": by_shard(20, 200)}, 12),
    "in order within shards": ({"sampler": by_shard(20, 200, is_shuffled=False)}, 12),
    "shards in order": ({"sampler": sorted(by_shard(20, 200), key=lambda index: index // 200)}, 12),
    "four shards at a time": ({"sampler": by_shard(40, 100, mixed=4)}, 25),
    "batches of a shard": ({"batch_sampler": as_batches(by_shard(20, 208))}, 13),
    "batches that are arrays": (
        {"batch_sampler": [np.array(each) for each in as_batches(by_shard(20, 208))]},
        13,
    ),
    "a rank's": ({"sampler": by_shard(20, 800)[1::4]}, 12),
    "a rank's shards": ({"sampler": by_shard(40, 200, is_shuffled=False)[:4000]}, 12),
    "one by one": ({"sampler": by_shard(20, 200), "batch_size": None}, 200),
    "two shards, and no more in this epoch": ({"sampler": by_shard(2, 2000)}, 125),
    "epoch after epoch": ({"sampler": by_shard(20, 200) * 3}, 12),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_sampler_that_goes_from_place_to_place_is_read_in_its_own_order_burst_after_burst(name):
    parts, run = RUNS[name]
    data = loader(range(16_000), **parts)
    burst = Run(data)
    bursts = [burst(5), burst(20)]
    batches = itertools.chain(*bursts, burst(30))
    order = data.sampler if data.batch_sampler is None else itertools.chain(*data.batch_sampler)
    assert (
        np.hstack(list(map(np.ravel, batches))).tolist()
        == list(order)[: 55 * (16 if data.is_batched else 1)]
    )
    # AND it is known how many batches come with one load of a shard
    assert burst.reading.run == pytest.approx(run, rel=0.02, abs=1)


NO_RUNS = {
    "shuffled": random.Random(0).sample(range(4000), 4000),
    "with replacement": random.Random(0).choices(range(4000), k=4000),
    "in order": list(ROWS),
    "in order, and padded": [*ROWS, 0],
    "from the end": [*reversed(ROWS)],
    "by length": sorted(ROWS, key=lambda row: row * 7919 % 100),
    "nearly by length": sorted(ROWS, key=lambda row: row + row * 7919 % 100),
    "each three times": [
        row for row in random.Random(0).sample(range(1000), 1000) for _ in range(3)
    ],
    "batches after each other, shuffled": list(
        itertools.chain(*random.Random(0).sample(as_batches([*ROWS]), 250))
    ),
    "the same": [7] * 1000,
    "names": [f"row {row}" for row in ROWS],
    "places and sizes": [(row, 224) for row in ROWS],
}


@pytest.mark.parametrize("name", NO_RUNS)
def test_any_other_order_has_no_runs_and_is_spread_over_an_epoch(name):
    burst = Run(
        loader(dict(zip(NO_RUNS[name], itertools.count(), strict=False)), sampler=NO_RUNS[name])
    )
    assert [len(burst(BLOCK_BATCHES + 2)), burst.reading.run] == [BLOCK_BATCHES + 2, 0]


class OfEpochs:
    """A sampler, or one of batches, with an epoch."""

    def __init__(self, batches, sampler=None):
        self.batches, self.sampler, self.epochs = batches, sampler, []

    def __iter__(self):
        return iter(self.batches)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_samplers_are_told_the_epoch():
    sampler, inner = OfEpochs(range(64)), OfEpochs(())
    outer = OfEpochs(as_batches(list(range(64))), inner)
    for data in (loader(sampler=sampler), loader(batch_sampler=outer)):
        Run(data, seed=5)(10)
    assert sampler.epochs == inner.epochs == outer.epochs == [5, 6, 7]


class Broken:
    def __iter__(self):
        yield from range(16)
        raise LookupError("no more")


class Drawing:
    """A sampler that draws from every generator a sampler might draw from."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        for _ in range(16):
            drawn = torch.randint(1000, (), generator=self.generator) + torch.randint(1000, ())
            yield (int(drawn) + random.randrange(1000) + int(np.random.randint(1000))) % 8  # noqa: NPY002


def test_a_sampler_that_draws_gives_a_run_the_same_samples_in_each_process_and_others_in_each_burst():
    drawing = loader(batch_size=8, sampler=Drawing())
    first, again, other = (Run(drawing, seed)(2) for seed in (0, 0, 1))
    assert first == again != other
    burst = Run(loader(sampler=RandomSampler(ROWS, replacement=True)))
    assert burst() != burst()


def test_a_burst_ends_where_a_sampler_is_empty_and_raises_what_it_raises():
    burst = Run(loader(sampler=Broken()))
    for _ in range(2):
        with pytest.raises(LookupError, match="no more"):
            burst()
    assert Run(loader(sampler=[]))() == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randint(1 << 30, (64,)))


class StreamOfEpochs(Stream):
    epochs = ()

    def set_epoch(self, epoch):
        self.epochs += (epoch,)


def test_a_stream_has_another_seed_and_epoch_in_each_burst_and_it_is_said_where_that_may_not_help():
    plain, told = (Run(loader(dataset)) for dataset in (Stream(), StreamOfEpochs()))
    for burst in (plain, told):
        assert burst(4) != burst(4)
    assert told.data.dataset.epochs == (1, 2)
    assert told.reading.note is Reading(LOADERS["in order"]).note is None
    assert "which every trial restarts" in plain.reading.note
