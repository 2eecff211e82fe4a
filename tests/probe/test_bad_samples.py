"""Samples that raise are named and left out, three end the run; batches that take seconds are measured by smaller ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BadSample
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, failed, measured, opened, warm_bench, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, ..., of which some raise."""

    def __init__(self, bad: Any = (), error: Exception | None = None, length: int = 64) -> None:
        self.bad, self.error, self.length = bad, error, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise self.error or ValueError(f"broken image {index}\nand more of it")
        return torch.tensor([float(index)])


class InBatches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class OddShape(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2) if index in self.bad else super().__getitem__(index)


class InWorkersOnly(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40 and get_worker_info() is not None:
            raise ValueError("no worker may read this")
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(10.0)
        raise OSError("connection lost")


def bench_of(dataset: Any, step: Any = None, batch_size: int | None = 4) -> tuple[Bench, WarmupReport]:
    return warm_bench(DataSide.from_loader(DataLoader(dataset, batch_size=batch_size)), train_step=step)


@pytest.mark.parametrize(("kind", "batch_size"), [(Numbers, None), (InBatches, 4)])
def test_a_sample_that_raises_is_named_and_nothing_takes_its_place(kind: type, batch_size: int | None) -> None:
    seen: list[list[float]] = []
    bench, _ = bench_of(kind((21,), length=32), lambda model, batch: seen.append(batch.flatten().tolist()), batch_size)

    found = measured(bench, plan=BurstPlan(max_s=0.2, min_s=0.1, relative_error=1e-6))

    assert found.bad_samples == (BadSample(name="sample 21", error="ValueError: broken image 21"),)
    good = [float(number) for number in range(32) if number != 21]
    size = batch_size or 1
    batches = [tuple(good[begin : begin + size]) for begin in range(0, len(good), size)]
    assert set(map(tuple, seen)) >= set(batches)  # before it was known, batches began elsewhere behind it
    assert {number for batch in seen for number in batch} == set(good)


class ByName(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, name: Any) -> torch.Tensor:
        if str(name) in ("('c', 2)", "2"):
            raise OSError("broken file")
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("keys", "name"),
    [([(each, number) for number, each in enumerate("abcdefgh")], "('c', 2)"), (np.arange(8), "2")],
    ids=["tuples", "numpy"],
)
def test_keys_of_any_kind_are_named_and_left_out(keys: Any, name: str) -> None:
    batches = BatchSampler(keys, 2, drop_last=False)
    bench, _ = warm_bench(DataSide.from_dataset(ByName(), batch_size=None, batch_sampler=batches))

    expected = BadSample(name=f"sample {name}", error="OSError: broken file")
    assert measured(bench, ONE_WORKER).bad_samples == (expected,)


def test_three_of_them_end_the_run_with_the_error() -> None:
    with pytest.raises(
        WorkloadError, match="sample 0 raises ValueError: broken image 0, and so do sample 1 and sample 2"
    ):
        bench_of(Numbers(bad=(0, 1, 2)))

    with (
        opened(workload(Numbers(bad=range(100, 2000, 20), length=2000))) as probe,
        pytest.raises(WorkloadError, match=r"sample \d+ raises ValueError: broken image \d+, and so do sample"),
    ):
        probe.probe.burst(ONE_WORKER, BurstPlan(max_s=5.0, min_s=5.0))


def test_samples_that_cannot_be_collated_are_named_by_their_batch_which_is_left_out() -> None:
    _, report = bench_of(OddShape(bad=(2,)))

    (bad,) = report.bad_samples
    assert bad.name == "collate_fn of samples 0, 1, 2, 3"
    assert bad.error.startswith("RuntimeError: stack expects each tensor to be equal size")
    with pytest.raises(WorkloadError, match=r"collate_fn of samples 0, 1, 2, 3 raises RuntimeError.*pass collate_fn="):
        bench_of(OddShape(bad=range(0, 64, 2)))


def test_a_stream_says_how_many_came_before_and_begins_again() -> None:
    bench, _ = bench_of(Stream())

    expected = BadSample(name="the sample after 10 of a process's stream", error="OSError: connection lost")
    assert measured(bench).bad_samples == (expected,)


@pytest.mark.parametrize(
    ("error", "kind"), [(MemoryError("9"), "out_of_memory"), (OSError(24, "Too many open files"), "descriptors")]
)
def test_what_is_no_fault_of_a_sample_has_its_own_kind(error: Exception, kind: Any) -> None:
    bench, _ = bench_of(Numbers((9,), error))

    failed(bench, kind)


@pytest.mark.parametrize(("bad", "is_blamed"), [(range(41, 42), False), (range(20, 10_000), True)])
def test_a_batch_that_the_step_raises_for_blames_no_configuration(bad: range, is_blamed: bool) -> None:
    # GIVEN a step that raises for one label, or for all after the first batches
    def step(model: Any, batch: torch.Tensor) -> None:
        if any(int(value) in bad for value in batch):
            raise IndexError("Target is out of bounds")

    bench, _ = bench_of(Numbers(), step)
    # THEN one is named and left out
    if is_blamed:
        failed(bench, "user_exception")
    else:
        expected = BadSample(name="the step on a batch", error="IndexError: Target is out of bounds")
        assert measured(bench).bad_samples == (expected,)


def test_workers_are_blamed_only_for_what_raises_in_them_alone() -> None:
    everywhere, _ = bench_of(Numbers(bad=(40,)))
    in_workers, _ = bench_of(InWorkersOnly())

    assert [bad.name for bad in measured(everywhere, ONE_WORKER).bad_samples] == ["sample 40"]
    failure = failed(in_workers, "user_exception", ONE_WORKER)
    assert "sample 40 raises ValueError: no worker may read this in a worker, and not" in failure.message
    assert failure.retryable


class Slow(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.11)
        return super().__getitem__(index)


class SlowInBatches(Numbers):
    """Each call takes a while, however many samples it is for."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.1)
        return [self[index] for index in indices]


def test_batches_that_take_seconds_are_measured_by_smaller_ones() -> None:
    bench, report = bench_of(Slow(), batch_size=32)

    found = measured(bench, TWO_WORKERS, BurstPlan(max_s=0.5, min_s=0.1, deadline_s=60.0))

    assert (report.samples, report.burst_batch_size, found.batch_size) == (32, 4, 4)
    assert found.samples_per_s.value == pytest.approx(2 / 0.11, rel=0.25)
    assert any("a batch of 32 samples takes about 4 s" in note and "batches of 4" in note for note in report.notes)


def test_calls_that_are_slow_whatever_they_fetch_are_made_whole() -> None:
    _, report = bench_of(SlowInBatches(), batch_size=32)

    assert (report.samples, report.burst_batch_size) == (32, None)
