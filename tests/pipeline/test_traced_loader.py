"""The traced loader delivers what the user's own loader would, whatever it is made of (in this process, real workers)."""

import itertools
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.datapipes.iter import IterableWrapper

from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import Handed, Stamp, forget_open_batch, make_traced_loader
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import MAIN_PROCESS, LoaderConfig
from tests.support.schedules import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def take(loader, count, workers=0, **config):
    """The first batches with their history, which is checked; the workers are gone afterwards."""
    data = DataSide.from_loader(loader)
    iterator = iter(
        make_traced_loader(data, LoaderConfig(num_workers=workers, **config), Reading(data))
    )
    taken = [(handed.batch, handed.fetch) for handed in itertools.islice(iterator, count)]
    for _, (_worker, start, fetched, collated, cpu_s, samples, _report) in taken:
        assert start <= fetched <= collated
        assert cpu_s >= 0
        assert samples > 0
    del iterator
    forget_open_batch()
    return taken


def listed(batches):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class Fetched(Numbers):
    def __getitems__(self, indices):
        return torch.tensor(indices).neg().unbind()


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


LOADERS = (
    DataLoader(Numbers(8), batch_size=3),
    DataLoader(Fetched(8), batch_size=4),
    DataLoader(Numbers(8), batch_size=4, sampler=range(7, -1, -1)),
    DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(Numbers(8)), 2, False)),
    DataLoader(Numbers(8), batch_size=None),
)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_batches_are_the_users_own_and_begin_again_at_their_end(workers):
    for loader in LOADERS:
        own = listed(loader)
        assert listed(batch for batch, _ in take(loader, 2 * len(own), workers)) == own * 2
    each = workers or 1  # every worker delivers all of a stream
    stream = [
        batch for batch, _ in take(DataLoader(Stream(range(6)), batch_size=4), 3 * each, workers)
    ]
    assert listed(stream[::each]) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    pipe = DataLoader(
        IterableWrapper(range(8)).sharding_filter(), batch_size=2, num_workers=workers
    )
    assert listed(batch for batch, _ in take(pipe, 4, workers)) == listed(
        pipe
    )  # torch shards its own


class Point(NamedTuple):
    x: torch.Tensor
    tags: dict


class WholeBatches(Numbers):
    """Its `__getitems__` returns a batch that is ready, as tensordict's does."""

    def __getitems__(self, indices):
        return dict.fromkeys("xyz", torch.tensor(indices))


class ListsOfIndices(Numbers):
    def __getitem__(self, index):
        return dict.fromkeys(index)


def stream_of(batch):
    return DataLoader(Stream([batch] * 3), batch_size=None, collate_fn=lambda batch: batch)


POINTS = [Point(torch.zeros(2), {"name": "a", "y": [torch.ones(3)]})] * 4
SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
)
ROWS_OF_INDICES = BatchSampler(range(8), 3, True)


@pytest.mark.parametrize(
    ("loader", "samples", "size"),
    [
        (DataLoader(POINTS, batch_size=4), 4, 4 * (4 * 2 + 4 * 3)),
        (DataLoader(WholeBatches(8), batch_size=4, collate_fn=lambda batch: batch), 4, 3 * 4 * 8),
        (DataLoader(ListsOfIndices(8), sampler=ROWS_OF_INDICES, batch_size=None), 3, 0),
        (stream_of({"path": "a", "n": torch.tensor(7), "x": torch.zeros(6)}), 6, 8 + 6 * 4),
        (stream_of({"graph": SPARSE, "y": torch.zeros(2)}), 3, 16 + 8 + 8),
        (stream_of(SimpleNamespace(values=torch.zeros(6, 2))), 6, 48),  # a type of the user's own
        (stream_of("nobody knows"), 1, 0),
    ],
)
def test_samples_are_counted_and_weighed_whoever_makes_the_batches(loader, samples, size):
    ((batch, fetch),) = take(loader, 1)
    assert (fetch[5], BatchShape.of(batch).bytes) == (samples, size)
    assert isinstance(batch, Point) == (loader.dataset is POINTS)


class PinsItself:
    """Takes a moment."""

    was_pinned_at = None

    def pin_memory(self):
        self.was_pinned_at = time.monotonic()
        return self


AROUND = (
    lambda one: one,
    lambda one: (one, "name"),
    lambda one: {"x": [one]},
    lambda one: Point(one, {}),
)


@pytest.mark.parametrize("make", AROUND)
def test_torchs_pinning_leaves_stamps_around_a_batch_which_arrives_as_it_was(make):
    one = PinsItself()
    batch = make(one)
    for worker in (0, MAIN_PROCESS):
        handed = Handed(Stamp(), batch, Stamp(), (worker, 1.0, 2.0, 3.0, 0.1, 4, None))
        assert handed.pinned == (None, None)
        begun, pinned, ended = time.monotonic(), pin_memory(handed), time.monotonic()
        assert (type(pinned.batch), pinned.fetch) == (type(batch), handed.fetch)
        assert pinned.batch == batch
        start, end = pinned.pinned
        # without workers the loop pins by itself, and waits for it
        assert worker == MAIN_PROCESS or begun <= start <= one.was_pinned_at <= end <= ended
        assert (start is None) == (end is None) == (worker == MAIN_PROCESS)
