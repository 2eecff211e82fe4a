"""The traced loader delivers what the user's own loader would, whatever it is made of."""

import itertools
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.datapipes.iter import IterableWrapper

from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import Handed, Stamp, forget_open_batch, make_traced_loader
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import MAIN_PROCESS, LoaderConfig
from tests.support.data import Rows, Stream

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def take(loader, count, workers=0):
    """The first batches and their histories, which are checked."""
    data = DataSide.from_loader(loader)
    traced = make_traced_loader(data, LoaderConfig(num_workers=workers), Reading(data))
    taken = [(handed.batch, handed.fetch) for handed in itertools.islice(traced, count)]
    for _, (_worker, start, fetched, collated, cpu_s, samples, _report) in taken:
        assert start < fetched <= collated
        assert 0 <= cpu_s < collated - start + 0.1
        assert samples > 0
    forget_open_batch()
    return taken


def listed(batches):
    return [batch.tolist() for batch in batches]


class Fetched(Rows):
    """Its `__getitems__` returns what is made of all indices, such as a batch that is ready."""

    def __getitems__(self, indices):
        return self.get(torch.tensor(indices))


NUMBERS = Rows(lambda index: torch.tensor([index, index * index]), 8)
LOADERS = (
    DataLoader(NUMBERS, batch_size=3),
    DataLoader(Fetched(lambda indices: indices.neg().unbind(), 8), batch_size=4),
    DataLoader(NUMBERS, batch_size=4, sampler=range(7, -1, -1)),
    DataLoader(NUMBERS, batch_sampler=BatchSampler(range(8), 2, False)),
    DataLoader(NUMBERS, batch_size=None),
)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_batches_are_the_users_own_epoch_after_epoch(workers):
    for loader in LOADERS:
        own = listed(loader)
        assert listed(batch for batch, _ in take(loader, 2 * len(own), workers)) == own * 2
    each = workers or 1  # every worker delivers all of a stream
    stream = take(DataLoader(Stream(int, 6), batch_size=4), 3 * each, workers)
    batches = listed(batch for batch, _ in stream[::each])
    assert batches == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    # THEN torch shards its own
    pipe = DataLoader(IterableWrapper(range(8)).sharding_filter(), 2, num_workers=workers)
    assert listed(batch for batch, _ in take(pipe, 4, workers)) == listed(pipe)


class Point(NamedTuple):
    x: torch.Tensor
    tags: dict


def stream_of(batch):
    return DataLoader(Stream(lambda _: batch, 3), batch_size=None, collate_fn=lambda batch: batch)


POINTS = [Point(torch.zeros(2), {"name": "a", "y": [torch.ones(3)]})] * 4
READY = Fetched(lambda indices: dict.fromkeys("xyz", indices), 8)
LISTS = Rows(dict.fromkeys, 8)  # is asked for lists of indices
SPARSE = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=True)


@pytest.mark.parametrize(
    ("loader", "samples", "size"),
    [
        (DataLoader(POINTS, batch_size=4), 4, 4 * (4 * 2 + 4 * 3)),
        (DataLoader(READY, batch_size=4, collate_fn=lambda batch: batch), 4, 3 * 4 * 8),
        (DataLoader(LISTS, sampler=BatchSampler(range(8), 3, True), batch_size=None), 3, 0),
        (stream_of({"path": "a", "n": torch.tensor(7), "x": torch.zeros(6)}), 6, 8 + 6 * 4),
        (stream_of({"graph": SPARSE, "y": torch.zeros(2)}), 3, 16 + 8 + 8),
        (stream_of(SimpleNamespace(values=torch.zeros(6, 2))), 6, 48),  # the user's own type
        (stream_of("nobody knows"), 1, 0),
    ],
)
def test_samples_are_counted_whoever_makes_batches(loader, samples, size):
    ((batch, fetch),) = take(loader, 1)
    assert fetch[5] == samples
    assert BatchShape.of(batch).bytes == size
    assert isinstance(batch, Point) == (loader.dataset is POINTS)


def broken(index):
    if index == 7:
        raise LookupError("broken")
    return index


COUNT = itertools.count()
WHOLE = Fetched(lambda indices: broken(len(indices) + 1), 8)
NO_COLLATING = {"collate_fn": lambda batch: broken(7)}


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Rows(broken, 8), batch_size=4), ("sample 7", [7])),
        (DataLoader(Rows(broken, 8), batch_size=None), ("sample 7", [7])),
        (DataLoader(Rows(broken, 8), sampler=torch.tensor([6, 7])), ("sample 7", [7])),
        (DataLoader(WHOLE, 6), ("the batch of samples 0, 1, 2, 3, ...", [*range(6)])),
        (
            DataLoader(NUMBERS, 4, **NO_COLLATING),
            ("collate_fn of the batch of samples 0, 1, 2, 3", [0, 1, 2, 3]),
        ),
        (DataLoader(Stream(int, 8), 4, **NO_COLLATING), ("collate_fn", [])),
        # it has begun anew after five samples
        (
            DataLoader(Stream(lambda _: broken(next(COUNT)), 5), 4),
            ("the sample after 2 of a process's stream", []),
        ),
    ],
)
def test_what_raises_is_named_and_replaced(loader, named):
    told, data = [], DataSide.from_loader(loader)

    def on_error(error, name, keys):
        told.append((type(error), name, [int(key) for key in keys]))
        return "in its place"

    traced = iter(make_traced_loader(data, LoaderConfig(), Reading(data), on_error=on_error))
    batch = next(handed.batch for handed in traced if told)
    forget_open_batch()
    assert told == [(LookupError, *named)]
    assert batch == "in its place"


def test_workers_start_as_the_users_do():
    own = DataLoader(NUMBERS, num_workers=1, multiprocessing_context="spawn")
    data = DataSide.from_loader(own)
    spawning, alone = (
        make_traced_loader(data, LoaderConfig(num_workers=workers), Reading(data))
        for workers in (1, 0)
    )
    assert spawning.multiprocessing_context.get_start_method() == "spawn"
    assert alone.multiprocessing_context is None


class PinsItself:
    was_pinned_at = None

    def pin_memory(self):
        self.was_pinned_at = time.monotonic()
        return self


@pytest.mark.parametrize("worker", [0, MAIN_PROCESS])
@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: (x, "name"), lambda x: {"x": [x]}, lambda x: Point(x, {})]
)
def test_torchs_pinning_leaves_stamps_around_a_batch(around, worker):
    one = PinsItself()
    batch = around(one)
    plain = pin_memory(batch)  # torch 2.6 makes lists of tuples
    handed = Handed(Stamp(), batch, Stamp(), (worker, 1.0, 2.0, 3.0, 0.1, 4, None))
    assert handed.pinned == (None, None)
    begun, pinned, ended = time.monotonic(), pin_memory(handed), time.monotonic()
    assert type(pinned.batch) is type(plain)
    assert pinned.batch == plain
    assert [*pinned.fetch] == [*handed.fetch]
    start, end = pinned.pinned
    if worker == MAIN_PROCESS:  # the loop pins by itself, and waits for it
        assert start is end is None
    else:
        assert begun <= start <= one.was_pinned_at <= end <= ended
