"""Samples that raise are named and left out, three end the run; batches that take seconds are measured by smaller ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.probe.opening import open_probe
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
    whole = {tuple(batch) for batch in seen}
    if batch_size is None:
        assert whole == {(float(number),) for number in range(32) if number != 21}
    else:
        assert whole == {tuple(map(float, range(b, b + 4))) for b in range(0, 32, 4) if b != 20} | {(20.0, 22.0, 23.0)}


def test_the_first_batch_goes_without_it_too() -> None:
    report = bench_of(Numbers(bad=(1,))).prepare()

    assert isinstance(report, WarmupReport)
    assert (report.samples, report.bad_samples[0].name) == (3, "sample 1")


def test_three_of_them_end_the_run_with_the_error() -> None:
    with pytest.raises(
        WorkloadError, match=r"sample 0 raises ValueError: broken image 0, and so do sample 1 and sample 2"
    ):
        bench_of(Numbers(bad=(0, 1, 2))).prepare()


def test_samples_that_cannot_be_collated_are_named_by_their_batch() -> None:
    outcome = bench_of(OddShape(bad=(2,))).prepare()

    assert isinstance(outcome, Failure)
    assert outcome.message.startswith("samples 0, 1, 2, 3 in collate_fn raises RuntimeError")


def test_a_stream_says_how_many_came_before() -> None:
    bench = bench_of(Stream())
    assert isinstance(bench.prepare(), WarmupReport)

    failure = bench.burst(LoaderConfig(), QUICK)

    assert isinstance(failure, Failure)
    assert failure.message.startswith("the sample after 10 of a process's stream raises OSError: connection lost")


@pytest.mark.parametrize(
    ("error", "kind"), [(MemoryError, "out_of_memory"), (torch.OutOfMemoryError, "user_exception")]
)
def test_what_is_no_fault_of_a_sample_has_its_own_kind(error: type[Exception], kind: str) -> None:
    bench = bench_of(Numbers(bad=(9,), error=error))
    assert isinstance(bench.prepare(), WarmupReport)

    outcome = bench.burst(LoaderConfig(), QUICK)

    if kind == "out_of_memory":
        assert isinstance(outcome, Failure)
        assert outcome.kind == kind
    else:
        assert isinstance(outcome, Measurement)


@pytest.mark.parametrize("dataset", [Numbers(bad=(40,)), InWorkersOnly()], ids=["everywhere", "in workers only"])
def test_workers_are_blamed_only_for_what_raises_in_them_alone(dataset: Any) -> None:
    workload = Workload(data=data_of(dataset), training=TrainingSide())
    with open_probe(workload, inspect_machine(), "process", None) as opened:
        outcome = opened.probe.burst(LoaderConfig(num_workers=1), QUICK)

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
    begun = time.monotonic()
    with open_probe(
        Workload(data=data_of(Slow(), 32), training=TrainingSide()), inspect_machine(), "process", None
    ) as opened:
        outcome = opened.probe.burst(LoaderConfig(num_workers=2), BurstPlan(max_s=0.5, min_s=0.1, deadline_s=60.0))

    assert isinstance(outcome, Measurement)
    assert (opened.warmup.samples, outcome.batch_size) == (2, 2)
    assert outcome.samples_per_s.value == pytest.approx(2 / 0.3, rel=0.25)
    assert any("a batch of 32 samples takes about 1" in note and "batches of 2" in note for note in opened.notes)
    assert time.monotonic() - begun < 20
