"""The ceiling of handing over: workers give copies of the first batch, and nothing of the user's dataset runs or moves on."""

import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from autotune_loader.bursts import bench
from autotune_loader.bursts.protocol import Allowance, Request
from autotune_loader.pipeline.batches import fields_of
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values import Failure, Measurement
from tests.support.bursts import QUICK, TWO_WORKERS, Made, opened, orphaned_segments, workload


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


@pytest.mark.process
@pytest.mark.parametrize(
    ("made", "method"),
    [*((made, "fork") for made in MADE), ("a tensor", "spawn"), ("a dict", "forkserver")],
)
def test_copies_of_the_first_batch_reach_the_step_whatever_the_batch_and_however_workers_start(
    made, method, tmp_path
):
    demand, before = tmp_path / "demand", orphaned_segments()
    dataset, collate = rows(MADE[made], demand)
    job = workload(
        dataset,
        training=TrainingSide(train_step=TakesEqual()),
        collate_fn=collate,
        multiprocessing_context=method,
    )
    with opened(job) as probe:
        demand.touch()
        left = []
        for _ in range(2):
            found = probe.probe.hand_over(TWO_WORKERS, QUICK)
            assert isinstance(found, Measurement), found
            left.append(
                {
                    each.pid
                    for each in psutil.Process(probe.probe._child.pid).children(recursive=True)
                }
            )
        assert {trace.worker for trace in found.traces} == {0, 1}
        assert {trace.samples for trace in found.traces} == {4}
        assert found.batch_bytes >= 48
        assert (found.pin_s, found.stages, found.memory) == (None, None, None)
        # AND no worker and no nursery stays: only what these are cloned from, and the fetcher
        assert left[0] == left[1]
        assert len(left[0]) == 1 or method != "fork"
    assert orphaned_segments() == before


@pytest.mark.parametrize(
    ("collate", "kind"),
    [
        (torch.stack, "crashed"),
        (lambda rows: {"lock": threading.Lock(), "x": torch.stack(rows)}, "pickling"),
    ],
)
def test_reading_goes_on_where_it_was_and_a_batch_that_no_worker_could_send_is_no_end_of_the_run(
    collate, kind, monkeypatch
):
    made, failure = [], Failure(kind="crashed", phase="batches", message="")
    run = SimpleNamespace(measured=lambda make_loader: made.append(make_loader()) or failure)
    monkeypatch.setattr(bench, "LoopRun", lambda *_: run)
    data = DataSide.from_dataset(
        Made(lambda index: torch.zeros(3), 4096), batch_size=4, collate_fn=collate
    )
    own = bench.Bench(data, TrainingSide, lambda: data, lambda message: None, 1, Allowance())
    message, place = own.look()
    assert own.prepare(message.ready).ready is not None
    message, after = own.run(Request(what="hand_over", plan=QUICK, config=TWO_WORKERS), place)
    assert (message.failure.kind, message.ends_run, after) == (kind, False, place)
    assert [each.num_workers for each in made] == [2] * (kind == "crashed")
