"""The ceiling of handing over: workers give copies of the first batch, and nothing of the user's dataset runs or moves on."""

import multiprocessing
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from autotune_loader.bursts.bench import Bench
from autotune_loader.bursts.protocol import Allowance, Request
from autotune_loader.pipeline.batches import fields_of
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values import Measurement
from tests.support.bursts import QUICK, TWO_WORKERS, Made, opened, orphaned_segments, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Pair(NamedTuple):
    x: torch.Tensor
    name: Any


def rows(make, demand):
    """Samples that are there until they are no longer to be read."""

    def sample(index):
        assert not demand.exists(), "code of the user's runs"
        return torch.full((3,), float(index))

    return Made(sample), lambda samples: make(torch.stack(samples))


class TakesEqual:
    """A step that takes batches like the first alone, in memory of their own."""

    def __init__(self):
        self.first = None

    def __call__(self, model, batch):
        self.first = batch if self.first is None else self.first
        assert type(batch) is type(self.first)
        assert str(fields_of(batch) or batch) == str(fields_of(self.first) or self.first)


class Custom:
    """Of the user's own."""

    def __init__(self, x):
        self.x = x


MADE = {
    "a tensor": lambda x: x,
    "a dict": lambda x: OrderedDict(x=x, more=[x[:, 0], "text"]),
    "a named tuple": lambda x: Pair(x, None),
    "an object": Custom,
}


@pytest.mark.parametrize(
    ("made", "method"), [*((made, "fork") for made in MADE), ("a tensor", "spawn"), ("a dict", "forkserver")]
)
def test_copies_of_the_first_batch_reach_the_step_whatever_the_batch_and_however_workers_start(made, method, tmp_path):
    demand, before = tmp_path / "demand", orphaned_segments()
    dataset, collate = rows(MADE[made], demand)
    job = workload(
        dataset, training=TrainingSide(train_step=TakesEqual()), collate_fn=collate, multiprocessing_context=method
    )
    with opened(job) as probe:
        demand.touch()
        found = probe.probe.hand_over(TWO_WORKERS, replace(QUICK, again=True))
        assert isinstance(found, Measurement), found
        assert {trace.worker for trace in found.traces} == {0, 1}
        assert {trace.samples for trace in found.traces} == {4}
        assert found.batch_bytes >= 48 or made == "an object"
        assert (found.pin_s, found.stages, found.memory) == (None, None, None)
        demand.unlink()
        # AND no worker and no nursery stays
        workers = [each for each in psutil.Process().children(recursive=True) if "Bench" in each.name()]
        assert workers == []
    assert orphaned_segments() == before


def bench_of(dataset, **parts):
    data = DataSide.from_dataset(dataset, batch_size=4, **parts)
    bench = Bench(data, TrainingSide, lambda: data, lambda message: None, 1, Allowance())
    message, place = bench.look()
    assert bench.prepare(message.ready).ready is not None
    return bench, place


def test_reading_goes_on_where_it_was():
    bench, place = bench_of(Made(lambda index: torch.zeros(3), 4096), multiprocessing_context="fork")
    request = Request(what="hand_over", plan=QUICK, config=TWO_WORKERS)
    message, after = bench.run(request, place)
    assert message.measurement is not None
    assert after == place


def test_a_batch_that_no_worker_could_send_is_a_failure_and_no_end_of_the_run():
    locked = Made(lambda index: torch.zeros(3), 4096), lambda rows: {"x": torch.stack(rows), "lock": threading.Lock()}
    bench, place = bench_of(locked[0], collate_fn=locked[1], multiprocessing_context="fork")
    message, _ = bench.run(Request(what="hand_over", plan=QUICK, config=TWO_WORKERS), place)
    assert message.failure.kind == "pickling"
    assert not message.ends_run
    assert multiprocessing.active_children() == []
