"""No burst of a run reads what another has read, as long as the dataset lasts."""

import itertools
import random
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from autotune_loader.pipeline.reading import BLOCK_BATCHES, SIDES_APART, Reading
from autotune_loader.pipeline.tracing import forget_open_batch, make_traced_loader
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig
from tests.support.data import Loader, Stream

ROWS = range(4000)
BURST = 12  # batches; eight bursts take 1,536 rows, in batches of 16


InOrder = type("InOrder", (SequentialSampler,), {})  # of the user's own


def loader(dataset=ROWS, **parts):
    size = {} if "batch_sampler" in parts else {"batch_size": 16}
    return DataSide.from_loader(DataLoader(dataset, **(size | parts)))


class Run:
    """The bursts of one run; each call is one, and gives what it reads, batch by batch."""

    def __init__(self, data, seed=0):
        self.data, self.reading = data, Reading(data, seed)

    def __call__(self, batches=BURST, **config):
        handed = make_traced_loader(self.data, LoaderConfig(**config), self.reading)
        read = [torch.as_tensor(one.batch).tolist() for one in itertools.islice(handed, batches)]
        forget_open_batch()
        return read


def samples_of(*bursts):
    return np.hstack([np.ravel(batch) for burst in bursts for batch in burst]).tolist()


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


EPOCHS = [
    # samples of an epoch, batches, and batches of 5
    (LOADERS["a rank's"], 2000, 125, 400),
    (LOADERS["batches by length"], 4000, 250, 250),
    (LOADERS["one by one"], 4000, 4000, 800),
    (loader(range(33)), 33, 3, 7),
    (loader(range(33), drop_last=True), 33, 2, 6),
    (loader(Stream(int, 8)), None, None, None),
]


@pytest.mark.parametrize(("data", "samples", "batches", "of_5"), EPOCHS)
def test_an_epoch_is_as_long_as_its_sampler(data, samples, batches, of_5):
    assert data.samples_per_epoch() == samples
    assert data.batches_per_epoch() == batches
    assert data.batches_per_epoch(5) == of_5


@pytest.mark.parametrize("name", LOADERS)
def test_bursts_read_new_samples_all_over_an_epoch(name):
    burst = Run(LOADERS[name])
    bursts = [burst() for _ in range(4 if name == "a rank's" else 8)]  # it has half of the rows
    samples = samples_of(*bursts)
    assert len(samples) == len(bursts) * BURST * (1 if name == "one by one" else 16)
    assert len(set(samples)) == len(samples)
    if name in ("in order", "an order of one's own", "batches by length"):
        # THEN together they are the middle of the epoch, whose order may follow the length
        assert np.mean(samples) / len(ROWS) == pytest.approx(0.5, abs=0.1)
    if name == "in order":
        # THEN each of them is, with some batches after each other, for a disk that reads ahead
        assert [np.mean(each) / len(ROWS) for each in bursts] == pytest.approx([0.5] * 8, abs=0.2)
        ahead = [after[0] == before[-1] + 1 for before, after in itertools.pairwise(bursts[0])]
        assert ahead == [number % BLOCK_BATCHES != 0 for number in range(1, BURST)]


@pytest.mark.parametrize("name", LOADERS)
def test_sides_of_a_comparison_read_apart(name):
    # GIVEN one side whose sampler, if it is the user's, goes on in this process, and two others
    sides = [Run(LOADERS[name], 1 + number * SIDES_APART) for number in range(3)]
    read = samples_of(*(side() for side in sides for _ in range(2)))
    assert len(set(read)) == len(read)
    if LOADERS[name].has_own_order:  # it goes on by itself
        return
    # WHEN all shall read the same THEN they do, and each goes on where it was
    before = [side.reading.place for side in sides]
    for side in sides:
        side.reading.go_on(5)
    one, *others = (side() for side in sides)
    assert [one] * 2 == others
    for side, place in zip(sides, before, strict=True):
        side.reading.go_on(place)
    assert not set(samples_of(*(side(3) for side in sides))).intersection(read)


SIZES = st.one_of(st.none(), st.integers(1, 32))


@settings(max_examples=100)
@given(
    length=st.integers(1, 600),
    own=st.fixed_dictionaries(
        {"batch_size": st.integers(1, 32), "shuffle": st.booleans(), "drop_last": st.booleans()}
    ),
    seed=st.integers(0, 2 * SIDES_APART),
    bursts=st.lists(st.tuples(st.integers(1, 6), SIZES), max_size=6),
)
def test_no_sample_comes_twice_before_all(length, own, seed, bursts):
    reading = Reading(loader(range(length), **own), seed)
    read, left = [], length
    # WHEN bursts have batches of any size
    for batches, size in bursts:
        taken = size or own["batch_size"]
        left -= (batches + 2) * taken  # some are left out where it begins, and at an end
        if left >= 0:
            burst = [*itertools.islice(reading.batches(taken), batches)]
            assert all(len(batch) <= taken for batch in burst)
            if burst and taken == own["batch_size"] and not own["shuffle"]:
                assert burst[0][0] % taken == 0  # it begins where a batch of training does
            read += samples_of(burst)
    # THEN no sample is read twice while others are left
    assert len(set(read)) == len(read)
    # THEN two epochs have every sample twice, and no smaller batch but at their ends
    batches = Reading(loader(range(length), **own | {"drop_last": False}), seed).batches
    first, second = [], []
    for epoch in (first, second):
        while sum(map(len, epoch)) < length:
            epoch.append(next(batches(own["batch_size"])))
        assert sorted(samples_of(epoch)) == list(range(length))
        assert sum(len(batch) < own["batch_size"] for batch in epoch) <= 1
    assert length < 100 or (first != second) == own["shuffle"]


def test_a_small_dataset_is_read_as_in_training():
    burst = Run(loader([1, 2, 3, 4, 5], batch_size=2))
    assert burst(2) == [[1, 2], [3, 4]]
    assert burst(4) == [[5], [1, 2], [3, 4], [5]]
    for size, batches in ((2, [[1, 2]] * 3), (3, [[1, 2, 3]] * 3), (4, [])):
        assert Run(loader([1, 2, 3], batch_size=2, drop_last=True))(3, batch_size=size) == batches


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataset_may_say_any_length(shuffled):
    # GIVEN one that draws a crop for any index
    data = loader(range(sys.maxsize), shuffle=shuffled)
    tracemalloc.start()
    samples, others = (samples_of(Run(data, seed)(50)) for seed in (0, 5))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    # THEN a probe that is started anew, with another seed, begins elsewhere
    assert len({*samples, *others}) == 2 * len(samples) == 1600
    assert np.ptp(samples) > 1 << 30


def by_shard(shards, samples, is_shuffled=True, mixed=1):
    """Indices of shards in random order, `mixed` of them at a time, shuffled within."""
    drawing = random.Random(0)
    numbers, indices = drawing.sample(range(shards), shards), []
    for at in range(0, shards, mixed):
        places = itertools.product(numbers[at : at + mixed], range(samples))
        within = [number * samples + place for number, place in places]
        indices += drawing.sample(within, len(within)) if is_shuffled else within
    return indices


def as_batches(indices, size=16):
    return [indices[at : at + size] for at in range(0, len(indices), size)]


RUNS = {
    "shuffled within shards": ({"sampler": by_shard(20, 200)}, 12),
    "in order within shards": ({"sampler": by_shard(20, 200, is_shuffled=False)}, 12),
    "shards in order": ({"sampler": sorted(by_shard(20, 200), key=lambda index: index // 200)}, 12),
    "four shards at a time": ({"sampler": by_shard(40, 100, mixed=4)}, 25),
    "arrays": ({"batch_sampler": [*map(np.array, as_batches(by_shard(20, 208)))]}, 13),
    "a rank's": ({"sampler": by_shard(20, 800)[1::4]}, 12),
    "a rank's shards": ({"sampler": by_shard(40, 200, is_shuffled=False)[:4000]}, 12),
    "one by one": ({"sampler": by_shard(20, 200), "batch_size": None}, 200),
    "two shards, and no more in this epoch": ({"sampler": by_shard(2, 2000)}, 125),
    "epoch after epoch": ({"sampler": by_shard(20, 200) * 3}, 12),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "run"), RUNS.values(), ids=RUNS)
def test_a_sampler_of_shards_keeps_its_order(parts, run):
    data = loader(range(16_000), **parts)
    burst = Run(data)
    read = samples_of(burst(5), burst(20), burst(30))
    order = data.sampler if data.batch_sampler is None else itertools.chain(*data.batch_sampler)
    assert read == list(order)[: len(read)]
    # THEN it is known how many batches come with one load of a shard
    assert burst.reading.run == pytest.approx(run, rel=0.02, abs=1)


DRAWN = random.Random(0)
NO_RUNS = {
    "shuffled": DRAWN.sample(ROWS, 4000),
    "with replacement": DRAWN.choices(ROWS, k=4000),
    "in order, and padded": [*ROWS, 0],
    "from the end": [*reversed(ROWS)],
    "by length": sorted(ROWS, key=lambda row: row * 7919 % 100),
    "nearly by length": sorted(ROWS, key=lambda row: row + row * 7919 % 100),
    "each three times": [row for row in DRAWN.sample(range(1000), 1000) for _ in range(3)],
    "batches, shuffled": [*itertools.chain(*DRAWN.sample(as_batches([*ROWS]), 250))],
    "the same": [7] * 1000,
    "names": [f"row {row}" for row in ROWS],
    "places and sizes": [(row, 224) for row in ROWS],
}  # fmt: skip


@pytest.mark.parametrize("name", NO_RUNS)
def test_any_other_order_has_no_runs(name):
    samples = dict(zip(NO_RUNS[name], itertools.count(), strict=False))
    burst = Run(loader(samples, sampler=NO_RUNS[name]))
    assert len(burst(BLOCK_BATCHES + 2)) == BLOCK_BATCHES + 2
    assert burst.reading.run == 0


class OfEpochs(Loader):
    """A sampler, or one of batches, with an epoch."""

    def __init__(self, indices, sampler=None):
        super().__init__(lambda: indices)
        self.sampler, self.epochs = sampler, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_samplers_are_told_the_epoch():
    sampler, inner = OfEpochs(range(64)), OfEpochs(())
    outer = OfEpochs(as_batches(range(64)), inner)
    for data in (loader(sampler=sampler), loader(batch_sampler=outer)):
        Run(data, seed=5)(10)
    assert sampler.epochs == inner.epochs == outer.epochs == [5, 6, 7]


def test_a_runs_seed_decides_what_a_sampler_draws():
    def drawn():  # from every generator that a sampler might draw from
        for _ in range(16):
            own = torch.randint(1000, (), generator=sampler.generator) + torch.randint(1000, ())
            yield (int(own) + random.randrange(1000) + int(np.random.randint(1000))) % 8  # noqa: NPY002

    sampler = Loader(drawn)
    sampler.generator = torch.Generator()
    data = loader(batch_size=8, sampler=sampler)
    first, again, other = (Run(data, seed)(2) for seed in (0, 0, 1))
    assert first == again != other
    for draws in ({"replacement": True}, {"num_samples": 32}):
        burst = Run(loader(sampler=RandomSampler(ROWS, **draws)))
        assert burst.data.has_own_order
        assert burst() != burst()


def test_a_samplers_end_and_error_are_the_bursts():
    def broken():
        yield from range(16)
        raise LookupError("no more")

    burst = Run(loader(sampler=Loader(broken)))
    for _ in range(2):
        with pytest.raises(LookupError, match="no more"):
            burst()
    assert Run(loader(sampler=[]))() == []


def test_each_burst_of_a_stream_draws_anew():
    streams, epochs = [Stream(lambda _: torch.randint(1 << 30, ()), 64) for _ in range(2)], []
    streams[1].set_epoch = epochs.append
    plain, told = (Run(loader(stream)) for stream in streams)
    for burst in (plain, told):
        assert burst(4) != burst(4)
    assert epochs == [1, 2]
    # THEN a note says where that may not help
    assert told.reading.note is Reading(LOADERS["in order"]).note is None
    assert "which every trial restarts" in plain.reading.note
