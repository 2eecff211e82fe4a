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
    """0, 1, 2, ..., of which some raise, or do so in workers alone, and some have another shape; each takes a nap."""

    def __init__(self, bad=(), bad_in_workers=(), odd=(), nap_s=0.0, length=64):
        self.bad, self.bad_in_workers, self.odd, self.nap_s, self.length = bad, bad_in_workers, odd, nap_s, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.nap_s)
        return self.read(index)

    def read(self, key):
        if key in self.bad or (get_worker_info() is not None and key in self.bad_in_workers):
            raise ValueError(f"broken image {key}\nand more of it")
        return torch.full((2 if key in self.odd else 1,), float(key[0] if isinstance(key, tuple) else key))


class InBatches(Numbers):
    """Each call takes a nap, however many samples it is for."""

    def __getitems__(self, indices):
        time.sleep(self.nap_s)
        return [self.read(index) for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)
        raise OSError("connection lost")


STREAM = DataSide.from_dataset(Stream(), batch_size=4)


def in_order(keys, bad):
    batches = BatchSampler(keys, 2, drop_last=False)
    return DataSide.from_dataset(Numbers(bad=[bad]), batch_size=None, batch_sampler=batches)


def bench_of(dataset, step=None, batch_size=4):
    return warm_bench(DataSide.from_loader(DataLoader(dataset, batch_size=batch_size)), train_step=step)


@pytest.mark.parametrize(("kind", "batch_size"), [(Numbers, None), (InBatches, 4)])
def test_a_sample_that_raises_is_named_and_nothing_takes_its_place(kind, batch_size):
    seen = []
    dataset = kind(bad=(21,), length=32)
    bench, _ = bench_of(dataset, lambda model, batch: seen.append(batch.flatten().tolist()), batch_size)

    found = measured(bench, plan=BurstPlan(max_s=0.5, min_s=0.5, relative_error=1e-6))

    assert found.bad_samples == (BadSample(name="sample 21", error="ValueError: broken image 21"),)
    good = [float(number) for number in range(32) if number != 21]
    size = batch_size or 1
    batches = [tuple(good[begin : begin + size]) for begin in range(0, len(good), size)]
    assert set(map(tuple, seen)) >= set(batches)  # before it was known, batches began elsewhere behind it
    assert {number for batch in seen for number in batch} == set(good)


@pytest.mark.parametrize(
    ("data", "name", "error"),
    [
        (in_order([*enumerate("abcd")], (2, "c")), "sample (2, 'c')", "ValueError: broken image (2, 'c')"),
        (in_order(np.arange(8), 2), "sample 2", "ValueError: broken image 2"),
        (STREAM, "the sample after 10 of a process's stream", "OSError: connection lost"),
    ],
    ids=["tuples", "numpy", "stream"],
)
def test_keys_of_any_kind_are_named_and_a_stream_says_how_many_came_before(data, name, error):
    bench, _ = warm_bench(data)
    assert measured(bench, ONE_WORKER).bad_samples == (BadSample(name=name, error=error),)


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
    _, report = bench_of(Numbers(odd=(6,)))

    (bad,) = report.bad_samples
    assert bad.name == "collate_fn of samples 4, 5, 6, 7"
    assert bad.error.startswith("RuntimeError: stack expects each tensor to be equal size")
    with pytest.raises(WorkloadError, match=r"collate_fn of samples 4, 5, 6, 7 raises RuntimeError.*pass collate_fn="):
        bench_of(Numbers(odd=range(0, 64, 2)))


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
    in_workers, _ = bench_of(Numbers(bad_in_workers=(9,)))

    assert [bad.name for bad in measured(everywhere, ONE_WORKER).bad_samples] == ["sample 9"]
    failure = failed(in_workers, "user_exception", ONE_WORKER)
    assert "sample 9 raises ValueError: broken image 9 in a worker, and not" in failure.message
    assert failure.retryable


def test_batches_that_take_seconds_are_measured_by_smaller_ones_unless_each_call_is_slow():
    bench, report = bench_of(Numbers(nap_s=0.11), batch_size=32)
    found = measured(bench, TWO_WORKERS, BurstPlan(max_s=0.5, min_s=0.1, deadline_s=60.0))

    assert (report.samples, report.burst_batch_size, found.batch_size) == (32, 4, 4)
    assert found.samples_per_s.value == pytest.approx(2 / 0.11, rel=0.25)
    assert any("a batch of 32 samples takes about 4 s" in note and "batches of 4" in note for note in report.notes)

    _, report = bench_of(InBatches(nap_s=0.1), batch_size=32)
    assert (report.samples, report.burst_batch_size) == (32, None)
