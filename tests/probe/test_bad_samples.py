"""Samples that raise are named and left out, three end the run; batches that take seconds are measured by smaller ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader import tune
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.probe.failures import StoppedError
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BadSample, Failure, Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

QUICK = BurstPlan(max_s=0.1, min_s=0.02, relative_error=0.5, deadline_s=30.0)


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, ..., of which some raise."""

    def __init__(self, bad: tuple[int, ...] = (), error: type[Exception] = ValueError, length: int = 64) -> None:
        self.bad, self.error, self.length = bad, error, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise self.error(f"broken image {index}\nand more of it")
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


def data_of(dataset: Any, batch_size: int | None = 4) -> DataSide:
    return DataSide.from_loader(DataLoader(dataset, batch_size=batch_size))


def bench_of(dataset: Any, step: Any = None, batch_size: int | None = 4) -> Bench:
    data = data_of(dataset, batch_size)
    return Bench(lambda: data, lambda: data, TrainingSide(train_step=step))


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("kind", [Numbers, InBatches])
def test_a_sample_that_raises_is_named_and_nothing_takes_its_place(kind: type, batch_size: int | None) -> None:
    seen: list[list[float]] = []
    bench = bench_of(kind(bad=(21,), length=32), lambda model, batch: seen.append(batch.flatten().tolist()), batch_size)
    assert isinstance(bench.prepare(), WarmupReport)

    outcome = bench.burst(LoaderConfig(), BurstPlan(max_s=0.2, min_s=0.1, relative_error=1e-6))

    assert isinstance(outcome, Measurement)
    assert outcome.bad_samples == (BadSample(name="sample 21", error="ValueError: broken image 21"),)
    good = [float(number) for number in range(32) if number != 21]
    size = batch_size or 1
    batches = [tuple(good[begin : begin + size]) for begin in range(0, len(good), size)]
    assert set(map(tuple, seen)) >= set(batches)  # before it was known, batches began elsewhere behind it
    assert {number for batch in seen for number in batch} == set(good)


def test_the_first_batch_goes_without_it_too() -> None:
    report = bench_of(Numbers(bad=(1,))).prepare()

    assert isinstance(report, WarmupReport)
    assert (report.samples, report.bad_samples[0].name) == (4, "sample 1")


class ByName(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, name: Any) -> torch.Tensor:
        if str(name) in ("c", "('c', 2)", "2"):
            raise OSError("broken file")
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (list("abcdefgh"), "'c'"),
        ([(each, number) for number, each in enumerate("abcdefgh")], "('c', 2)"),
        (np.arange(8), "2"),
    ],
    ids=["strings", "tuples", "numpy"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_keys_of_any_kind_are_named_and_left_out(keys: Any, name: str, workers: int) -> None:
    batches = BatchSampler(keys, 2, drop_last=False)
    data = DataSide.from_dataset(ByName(), batch_size=None, batch_sampler=batches)
    bench = Bench(lambda: data, lambda: data, TrainingSide())
    assert isinstance(bench.prepare(), WarmupReport)

    outcome = bench.burst(LoaderConfig(num_workers=workers), QUICK)

    assert isinstance(outcome, Measurement)
    assert outcome.bad_samples == (BadSample(name=f"sample {name}", error="OSError: broken file"),)


def test_three_of_them_end_the_run_with_the_error() -> None:
    with pytest.raises(
        WorkloadError, match=r"sample 0 raises ValueError: broken image 0, and so do sample 1 and sample 2"
    ):
        bench_of(Numbers(bad=(0, 1, 2))).prepare()


def test_samples_that_cannot_be_collated_are_named_by_their_batch_which_is_left_out() -> None:
    outcome = bench_of(OddShape(bad=(2,))).prepare()

    assert isinstance(outcome, WarmupReport)
    (bad,) = outcome.bad_samples
    assert bad.name == "collate_fn of samples 0, 1, 2, 3"
    assert bad.error.startswith("RuntimeError: stack expects each tensor to be equal size")
    with pytest.raises(WorkloadError, match=r"collate_fn of samples 0, 1, 2, 3 raises RuntimeError.*pass collate_fn="):
        bench_of(OddShape(bad=tuple(range(0, 64, 2)))).prepare()


def test_a_stream_says_how_many_came_before_and_begins_again() -> None:
    bench = bench_of(Stream())
    assert isinstance(bench.prepare(), WarmupReport)

    outcome = bench.burst(LoaderConfig(), QUICK)

    assert isinstance(outcome, Measurement)
    assert outcome.bad_samples == (
        BadSample(name="the sample after 10 of a process's stream", error="OSError: connection lost"),
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("9"), "out_of_memory"),
        (OSError(24, "Too many open files"), "descriptors"),
        (StoppedError("9"), None),
    ],
    ids=["memory", "descriptors", "stopped"],
)
def test_what_is_no_fault_of_a_sample_has_its_own_kind(error: Exception, kind: str | None) -> None:
    class Wanting(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 9:
                raise error
            return super().__getitem__(index)

    bench = bench_of(Wanting())
    assert isinstance(bench.prepare(), WarmupReport)

    outcome = bench.burst(LoaderConfig(), QUICK)

    assert isinstance(outcome, Failure)
    assert kind in (outcome.kind, None)
    assert not outcome.message.startswith("sample 9") or kind == "descriptors"


@pytest.mark.parametrize(("bad", "is_blamed"), [(range(41, 42), False), (range(20, 10_000), True)])
def test_a_batch_that_the_step_raises_for_blames_no_configuration(bad: range, is_blamed: bool) -> None:
    # GIVEN a step that raises for some labels: one of them, or all after the first batches
    def step(model: Any, batch: torch.Tensor) -> None:
        if any(int(value) in bad for value in batch):
            raise IndexError("Target is out of bounds")

    bench = bench_of(Numbers(), step)
    assert isinstance(bench.prepare(), WarmupReport)
    # WHEN a burst meets them
    outcome = bench.burst(LoaderConfig(), QUICK)
    # THEN a few are named, and left out
    assert isinstance(outcome, Failure) == is_blamed
    if isinstance(outcome, Measurement):
        expected = BadSample(name="the step on a batch", error="IndexError: Target is out of bounds")
        assert outcome.bad_samples == (expected,)


@pytest.mark.parametrize("dataset", [Numbers(bad=(40,)), InWorkersOnly()], ids=["everywhere", "in workers only"])
def test_workers_are_blamed_only_for_what_raises_in_them_alone(dataset: Any) -> None:
    bench = bench_of(dataset)
    assert isinstance(bench.prepare(), WarmupReport)

    outcome = bench.burst(LoaderConfig(num_workers=1), QUICK)

    if dataset.bad:
        assert isinstance(outcome, Measurement)
        assert [bad.name for bad in outcome.bad_samples] == ["sample 40"]
    else:
        assert isinstance(outcome, Failure)
        assert "sample 40 raises ValueError: no worker may read this in a worker, and not" in outcome.message
        assert outcome.retryable


class Slow(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.3)
        return torch.tensor([float(index)])


def test_batches_that_take_seconds_are_measured_by_smaller_ones() -> None:
    bench = bench_of(Slow(), batch_size=32)
    report = bench.prepare()
    assert isinstance(report, WarmupReport)

    outcome = bench.burst(LoaderConfig(num_workers=2), BurstPlan(max_s=0.5, min_s=0.1, deadline_s=60.0))

    assert isinstance(outcome, Measurement)
    assert (report.samples, report.burst_batch_size, outcome.batch_size) == (32, 2, 2)
    assert outcome.samples_per_s.value == pytest.approx(2 / 0.3, rel=0.25)
    assert any("a batch of 32 samples takes about 1" in note and "batches of 2" in note for note in report.notes)


class SlowInBatches(Numbers):
    """Each call takes a while, however many samples it is for."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.3)
        return [torch.tensor([float(index)]) for index in indices]


def test_calls_that_are_slow_whatever_they_fetch_are_made_whole() -> None:
    report = bench_of(SlowInBatches(), batch_size=32).prepare()

    assert isinstance(report, WarmupReport)
    assert (report.samples, report.burst_batch_size) == (32, None)


class Waiting(Numbers):
    """Each sample waits, as for a disk: workers help."""

    def __init__(self, seconds: float, bad: tuple[int, ...] = (), length: int = 2000) -> None:
        super().__init__(bad, length=length)
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def tuned(dataset: Any, batch_size: int, budget: float) -> Any:
    return tune(dataset, batch_size=batch_size, budget=budget, reuse=False, progress=False, max_workers=4)


def test_one_bad_sample_of_2000_changes_nothing_of_what_is_chosen() -> None:
    result = tuned(Waiting(0.002, (700,)), 16, 12)

    # 2 ms a sample, and no step: each worker that there may be helps
    assert result.best.num_workers >= 3
    assert [trial for trial in result.trials if trial.failure is not None] == []


def test_three_bad_samples_end_the_run_with_their_error() -> None:
    with pytest.raises(
        WorkloadError, match=r"sample \d+ raises ValueError: broken image \d+, and so do sample \d+ and"
    ):
        tuned(Numbers(bad=tuple(range(100, 2000, 20)), length=2000), 16, 10)
