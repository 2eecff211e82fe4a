"""Samples that raise are named and left out, three end the run; batches that take seconds are measured by smaller ones."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BadSample
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, failed, measured, opened, warm_bench, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Numbers(Dataset):
    """0, 1, 2, ..., of which some raise."""

    def __init__(self, bad=(), length=64):
        self.bad, self.length = bad, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"broken image {index}\nand more of it")
        return torch.tensor([float(index)])


class InBatches(Numbers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OddShape(Numbers):
    def __getitem__(self, index):
        return torch.zeros(2 if index in self.bad else 1)


class InWorkersOnly(Numbers):
    def __getitem__(self, index):
        if index == 9 and get_worker_info() is not None:
            raise ValueError("no worker may read this")
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)
        raise OSError("connection lost")


class ByName(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, name):
        if str(name) in ("('c', 2)", "2"):
            raise OSError("broken file")
        return torch.zeros(2)


def by_name(keys):
    return DataSide.from_dataset(ByName(), batch_size=None, batch_sampler=BatchSampler(keys, 2, drop_last=False))


def stream():
    return DataSide.from_dataset(Stream(), batch_size=4)


def bench_of(dataset, step=None, batch_size=4):
    return warm_bench(DataSide.from_loader(DataLoader(dataset, batch_size=batch_size)), train_step=step)


@pytest.mark.parametrize(("kind", "batch_size"), [(Numbers, None), (InBatches, 4)])
def test_a_sample_that_raises_is_named_and_nothing_takes_its_place(kind, batch_size):
    seen = []
    bench, _ = bench_of(
        kind(bad=(21,), length=32), lambda model, batch: seen.append(batch.flatten().tolist()), batch_size
    )

    found = measured(bench, plan=BurstPlan(max_s=0.2, min_s=0.1, relative_error=1e-6))

    assert found.bad_samples == (BadSample(name="sample 21", error="ValueError: broken image 21"),)
    good = [float(number) for number in range(32) if number != 21]
    size = batch_size or 1
    batches = [tuple(good[begin : begin + size]) for begin in range(0, len(good), size)]
    assert set(map(tuple, seen)) >= set(batches)  # before it was known, batches began elsewhere behind it
    assert {number for batch in seen for number in batch} == set(good)


@pytest.mark.parametrize(
    ("data", "name", "error"),
    [
        (by_name([(each, number) for number, each in enumerate("abcdefgh")]), "sample ('c', 2)", "broken file"),
        (by_name(np.arange(8)), "sample 2", "broken file"),
        (stream(), "the sample after 10 of a process's stream", "connection lost"),
    ],
    ids=["tuples", "numpy", "stream"],
)
def test_keys_of_any_kind_are_named_and_a_stream_says_how_many_came_before(data, name, error):
    bench, _ = warm_bench(data)
    assert measured(bench, ONE_WORKER).bad_samples == (BadSample(name=name, error=f"OSError: {error}"),)


def test_three_of_them_end_the_run_with_the_error():
    with pytest.raises(
        WorkloadError, match="sample 0 raises ValueError: broken image 0, and so do sample 1 and sample 2"
    ):
        bench_of(Numbers(bad=(0, 1, 2)))

    with (
        opened(workload(Numbers(bad=range(100, 2000, 20), length=2000))) as probe,
        pytest.raises(WorkloadError, match=r"sample \d+ raises ValueError: broken image \d+, and so do sample"),
    ):
        probe.probe.burst(ONE_WORKER, BurstPlan(max_s=5.0, min_s=5.0))


def test_samples_that_cannot_be_collated_are_named_by_their_batch_which_is_left_out():
    _, report = bench_of(OddShape(bad=(2,)))

    (bad,) = report.bad_samples
    assert bad.name == "collate_fn of samples 0, 1, 2, 3"
    assert bad.error.startswith("RuntimeError: stack expects each tensor to be equal size")
    with pytest.raises(WorkloadError, match=r"collate_fn of samples 0, 1, 2, 3 raises RuntimeError.*pass collate_fn="):
        bench_of(OddShape(bad=range(0, 64, 2)))


@pytest.mark.parametrize(("bad", "is_blamed"), [(range(41, 42), False), (range(20, 10_000), True)])
def test_a_batch_that_the_step_raises_for_blames_no_configuration(bad, is_blamed):
    # GIVEN a step that raises for one label, or for all after the first batches
    def step(model, batch):
        if any(int(value) in bad for value in batch):
            raise IndexError("Target is out of bounds")

    bench, _ = bench_of(Numbers(), step)
    # THEN one is named and left out
    if is_blamed:
        failed(bench, "user_exception")
    else:
        expected = BadSample(name="the step on a batch", error="IndexError: Target is out of bounds")
        assert measured(bench).bad_samples == (expected,)


def test_workers_are_blamed_only_for_what_raises_in_them_alone():
    everywhere, _ = bench_of(Numbers(bad=(9,)))
    in_workers, _ = bench_of(InWorkersOnly())

    assert [bad.name for bad in measured(everywhere, ONE_WORKER).bad_samples] == ["sample 9"]
    failure = failed(in_workers, "user_exception", ONE_WORKER)
    assert "sample 9 raises ValueError: no worker may read this in a worker, and not" in failure.message
    assert failure.retryable


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.11)
        return super().__getitem__(index)


class SlowInBatches(InBatches):
    """Each call takes a while, however many samples it is for."""

    def __getitems__(self, indices):
        time.sleep(0.1)
        return super().__getitems__(indices)


def test_batches_that_take_seconds_are_measured_by_smaller_ones_unless_each_call_is_slow():
    bench, report = bench_of(Slow(), batch_size=32)
    found = measured(bench, TWO_WORKERS, BurstPlan(max_s=0.5, min_s=0.1, deadline_s=60.0))

    assert (report.samples, report.burst_batch_size, found.batch_size) == (32, 4, 4)
    assert found.samples_per_s.value == pytest.approx(2 / 0.11, rel=0.25)
    assert any("a batch of 32 samples takes about 4 s" in note and "batches of 4" in note for note in report.notes)

    _, report = bench_of(SlowInBatches(), batch_size=32)
    assert (report.samples, report.burst_batch_size) == (32, None)
