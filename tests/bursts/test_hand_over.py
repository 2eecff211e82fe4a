"""The ceiling of handing over: workers give copies of the first batch, and nothing of the user's
dataset runs or moves on."""

import threading
from collections import OrderedDict
from dataclasses import replace
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
from tests.support.bursts import QUICK, TWO_WORKERS, Made, opened, orphans_but, segments, workload


class Pair(NamedTuple):
    x: torch.Tensor
    name: Any


class Custom:
    """Of the user's own."""

    def __init__(self, x):
        self.x = x


class TakesEqual:
    """A step that takes batches like the first alone, in memory of their own."""

    def __init__(self):
        self.first = None

    def __call__(self, model, batch):
        self.first = batch if self.first is None else self.first
        assert type(batch) is type(self.first)
        assert str(fields_of(batch) or batch) == str(fields_of(self.first) or self.first)


MADE = {
    "a tensor": lambda x: x,
    "a dict": lambda x: OrderedDict(x=x, more=[x[:, 0], "text"]),
    "a named tuple": lambda x: Pair(x, None),
    "an object": Custom,
}
CASES = [
    ("a tensor", "fork"), ("an object", "fork"),
    *(
        pytest.param(*case, marks=pytest.mark.system)
        for case in (("a dict", "fork"), ("a named tuple", "fork"), ("a dict", "forkserver"))
    ),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(("made", "method"), CASES)
def test_copies_of_the_first_batch_reach_the_step(made, method, tmp_path):
    def sample(index):
        assert not demand.exists(), "code of the user's runs"
        return torch.full((3,), float(index))

    def collate(samples):
        return MADE[made](torch.stack(samples))

    def children():
        whole = psutil.Process(probe.probe._child.pid).children(recursive=True)
        return {each.pid for each in whole}

    demand, before = tmp_path / "demand", segments()
    training, parts = TrainingSide(train_step=TakesEqual()), {"multiprocessing_context": method}
    with opened(workload(Made(sample), 4, training, collate_fn=collate, **parts)) as probe:
        demand.touch()
        left = []
        for _ in range(2):
            found = probe.probe.hand_over(TWO_WORKERS, QUICK)
            assert isinstance(found, Measurement), found
            left.append(children())
        assert {trace.worker for trace in found.traces} == {0, 1}
        assert {trace.samples for trace in found.traces} == {4}
        assert found.batch_bytes >= 48
        for name in ("pin_s", "stages", "memory"):
            assert getattr(found, name) is None
        # AND no worker and no nursery stays: only what these are cloned from, and the fetcher
        assert left[0] == left[1]
        assert len(left[0]) == 1 or method != "fork"
    assert not orphans_but(before)


def with_a_lock(samples):
    return {"text": "a" * (1 << 17), "lock": threading.Lock(), "x": torch.stack(samples)}


ALONE, OWN = "no model: the DataLoader alone", "train_step(model, batch)"


@pytest.mark.parametrize(("collate", "train_step", "kind", "workers", "phases", "says"), [
    (torch.stack, None, "crashed", [2], ["first_batch", "step"], ALONE),
    (with_a_lock, lambda *_: 0, "pickling", [], ["first_batch", "first_batch", "step"], OWN),
])  # fmt: skip
def test_handing_over_moves_and_ends_nothing(
    collate, train_step, kind, workers, phases, says, monkeypatch
):
    """Reading goes on where it was, and a batch that no worker could send is no end of the run."""
    made, said, failure = [], [], Failure(kind="crashed", phase="batches", message="")
    run = SimpleNamespace(measured=lambda make_loader: made.append(make_loader()) or failure)
    monkeypatch.setattr(bench, "LoopRun", lambda *_: run)
    rows = Made(lambda index: torch.zeros(3), 4096)
    data = DataSide.from_dataset(rows, batch_size=4, collate_fn=collate)
    monkeypatch.setattr(bench, "lock_pages", lambda *_: pytest.fail("of the CPU none are locked"))
    side = TrainingSide(train_step=train_step)
    own = bench.Bench(data, lambda: side, lambda: data, said.append, 1, Allowance())
    message, (begun, *rest) = own.look()
    place = begun + 1, *rest  # of another process
    assert 0 < message.ready.first_fetch_s < 60
    # GIVEN a step in another process than that which has seen the batch
    own._first = None
    words = {"step": says, "default_threads": torch.get_num_threads()}
    assert own.prepare(message.ready).ready == replace(message.ready, **words)
    assert [each.phase for each in said] == phases  # a batch that cannot be sent is read once more
    name = "the step" if train_step is None else "train_step"
    assert own.step_writes("a.pt", OSError()).message.startswith(f"{name} writes a.pt, but trials")
    message, after = own.run(Request(what="hand_over", plan=QUICK, config=TWO_WORKERS), place)
    assert message.failure.kind == kind
    assert not message.ends_run
    assert after == place
    assert [each.num_workers for each in made] == workers
