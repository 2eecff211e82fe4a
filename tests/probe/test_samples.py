"""Samples that raise, and samples that are slow, as bursts read them; with real workers where these matter."""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from test_faults import QUICK, TWO_WORKERS, payload_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.trace_log import unread_s_of
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe import samples as samples_module
from autotune_loader.probe.bench import Bench
from autotune_loader.probe.failures import StoppedError
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.probe.samples import MOST_NOTED, Notebook, for_bursts, raises_alone
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from tests.support import FakeClock


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, ..., of which some raise."""

    def __init__(self, bad: tuple[int, ...] = (), error: type[Exception] = ValueError, length: int = 64) -> None:
        self.bad, self.error, self.length = bad, error, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise self.error(f"broken image {index}\nand more of it")
        return torch.tensor(index)


class InBatches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    """0 to 9, and then it raises."""

    def __init__(self, begins_with: int = 0) -> None:
        self.begins_with = begins_with

    def __iter__(self) -> Iterator[int]:
        yield from range(self.begins_with, 10)
        raise OSError("connection lost")


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    return Notebook(str(tmp_path))


@pytest.fixture(autouse=True)
def closed_batch() -> Iterator[None]:
    yield
    forget_open_batch()


def side(dataset: Any, batch_size: int | None = 4, **parts: Any) -> DataSide:
    return DataSide.from_loader(DataLoader(dataset, batch_size=batch_size, **parts))


def batches(data: DataSide, notebook: Notebook, count: int, *, is_paced: bool = False) -> list[Any]:
    loader = make_traced_loader(for_bursts(data, notebook, is_paced=is_paced), LoaderConfig(), seed=0)
    return list(islice(iter(loader), count))


def values(data: DataSide, notebook: Notebook, count: int) -> list[list[int]]:
    return [sorted(batch.tolist()) for batch, _ in batches(data, notebook, count)]


@pytest.mark.parametrize("kind", [Numbers, InBatches])
def test_a_bad_sample_has_another_of_its_batch_in_its_place_and_is_noted(kind: type, notebook: Notebook) -> None:
    read = values(side(kind(bad=(5, 9))), notebook, 4)

    assert read == [[0, 1, 2, 3], [4, 6, 7, 7], [8, 10, 11, 11], [12, 13, 14, 15]]
    noted = notebook.taken()
    assert [(each.name, each.error, each.keys) for each in noted] == [
        ("sample 5", "ValueError: broken image 5", (5,)),
        ("sample 9", "ValueError: broken image 9", (9,)),
    ]
    assert notebook.taken() == []


def test_where_most_raise_the_first_error_is_raised(notebook: Notebook) -> None:
    with pytest.raises(ValueError, match="broken image 1"):
        values(side(Numbers(bad=tuple(range(1, 64)))), notebook, 1)

    # BUT a run of bad ones among others is no more than a run
    assert values(side(Numbers(bad=tuple(range(4, 12)))), notebook, 4)[1:3] == [[3, 3, 3, 3], [3, 3, 3, 3]]


@pytest.mark.parametrize("error", [MemoryError, StoppedError, RuntimeError])
def test_what_is_no_fault_of_a_sample_is_raised(error: type[Exception], notebook: Notebook) -> None:
    class Wanting(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise error("CUDA out of memory")
            return super().__getitem__(index)

    with pytest.raises(error):
        values(side(Wanting()), notebook, 4)
    assert notebook.taken() == []


def test_without_batches_a_bad_sample_has_the_one_before_in_its_place(notebook: Notebook) -> None:
    read = batches(side(Numbers(bad=(2,)), batch_size=None), notebook, 4)

    assert [int(sample) for sample, _ in read] == [0, 1, 1, 3]
    assert [each.name for each in notebook.taken()] == ["sample 2"]


@pytest.mark.parametrize("odd", [0, 2, 7])
def test_a_sample_that_cannot_be_collated_with_the_others_is_found(odd: int, notebook: Notebook) -> None:
    class Shapes(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((3 if index == odd else 2,), index)

    (batch, _), _ = batches(side(Shapes(), batch_size=8), notebook, 2)

    assert batch.shape == (8, 2)
    assert odd not in batch
    (noted,) = notebook.taken()
    assert noted.name == f"sample {odd}"
    # AND it is seen again by collating two
    assert raises_alone(side(Shapes()), noted)
    assert not raises_alone(side(Numbers()), noted)


def test_samples_none_of_which_go_together_raise_what_they_raise(notebook: Notebook) -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(index)

    with pytest.raises(RuntimeError, match="equal size"):
        batches(side(Ragged(), batch_size=8), notebook, 1)


def test_a_stream_that_raises_starts_over(notebook: Notebook) -> None:
    assert values(side(Stream()), notebook, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert [each.name for each in notebook.taken()] == ["the sample after 10 of a process's stream"]

    with pytest.raises(OSError, match="connection lost"):
        values(side(Stream(begins_with=10)), notebook, 1)


def test_no_more_are_noted_than_anybody_reads(notebook: Notebook) -> None:
    values(side(Numbers(bad=tuple(range(0, 400, 4)), length=400)), notebook, 100)

    assert len(notebook.taken()) == MOST_NOTED


def test_the_dataset_stays_the_users_and_travels(notebook: Notebook) -> None:
    for data in (side(Numbers()), side(Stream())):
        wrapped = for_bursts(data, notebook, is_paced=True).dataset
        assert isinstance(wrapped, type(data.dataset))
        assert isinstance(
            make_traced_loader(replace(data, dataset=wrapped), LoaderConfig(), 0).dataset, type(data.dataset)
        )
        assert type(pickle.loads(pickle.dumps(wrapped))) is type(wrapped)


class Slow(Numbers):
    """Samples that take so long, on a clock that is not real."""

    def __init__(self, clock: FakeClock, *seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.advance(self.seconds[min(index, len(self.seconds) - 1)])
        return super().__getitem__(index)


class SlowStream(IterableDataset[int]):
    def __init__(self, dataset: Slow) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        for index in range(64):
            yield int(self.dataset[index])


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize(
    ("seconds", "read", "unread_s"),
    [((1.0,), 2, 14.0), ((0.3,), 4, 3.6), ((0.05,), 16, 0.0), ((9.0, 0.001), 16, 0.0), ((3.0, 1.0), 2, 14.0)],
    ids=["slow", "slow enough", "quick", "slow to begin with", "slow, and slower to begin with"],
)
def test_a_slow_fetch_is_cut_short_and_filled_up(
    seconds: tuple[float, ...],
    read: int,
    unread_s: float,
    stream: bool,
    notebook: Notebook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    fake = types.SimpleNamespace(monotonic=clock)
    monkeypatch.setattr(samples_module, "time", fake)
    dataset: Any = Slow(clock, *seconds)

    (batch, fetch), *_ = batches(
        side(SlowStream(dataset) if stream else dataset, batch_size=16), notebook, 1, is_paced=True
    )

    assert len(batch) == 16
    assert len(set(batch.tolist())) == read
    assert unread_s_of(fetch) == pytest.approx(unread_s)


class SlowInBatches(Slow):
    """A call takes `seconds[0]`, and each of its samples `seconds[1]`."""

    def __getitems__(self, indices: list[int]) -> Any:
        self.clock.advance(self.seconds[0] + self.seconds[1] * len(indices))
        return [torch.tensor(index) for index in indices]


@pytest.mark.parametrize(
    ("seconds", "read", "took_s", "unread_s"),
    [
        ((0.0, 1.0), 4, 4.0, 12.0),
        ((0.5, 1.0), 4, 5.0, 11.5),
        ((5.0, 0.0), 16, 15.0, 0.0),
        ((0.01, 0.01), 16, 0.18, 0.0),
    ],
    ids=["slow samples", "slow calls of slow samples", "slow calls", "quick"],
)
def test_a_slow_fetch_of_many_at_once_is_cut_short_where_its_samples_are_slow(
    seconds: tuple[float, ...],
    read: int,
    took_s: float,
    unread_s: float,
    notebook: Notebook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(samples_module, "time", types.SimpleNamespace(monotonic=clock))

    (batch, fetch), *_ = batches(side(SlowInBatches(clock, *seconds), batch_size=16), notebook, 1, is_paced=True)

    assert (len(batch), len(set(batch.tolist()))) == (16, read)
    assert (clock(), unread_s_of(fetch)) == (pytest.approx(took_s), pytest.approx(unread_s))


def bench_of(dataset: Any, scratch: Path) -> Bench:
    data = DataSide.from_dataset(dataset, batch_size=4, sampler=SequentialSampler(dataset))
    bench = Bench(lambda: data, lambda: data, lambda: TrainingSide(device="cpu"), str(scratch))
    assert not isinstance(bench.prepare(), Failure)
    return bench


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_bad_sample_is_named_by_workers_too_and_blames_no_configuration(tmp_path: Path, method: str) -> None:
    bench = bench_of(Numbers(bad=(41,)), tmp_path)

    measured = bench.burst(LoaderConfig(num_workers=1, multiprocessing_context=method), QUICK)

    assert isinstance(measured, Measurement)
    assert [(bad.name, bad.error) for bad in measured.bad_samples] == [("sample 41", "ValueError: broken image 41")]


@pytest.mark.process
@pytest.mark.parametrize(("bad", "is_blamed"), [(range(41, 42), False), (range(20, 10_000), True)])
def test_a_batch_that_the_step_raises_for_blames_no_configuration(tmp_path: Path, bad: range, is_blamed: bool) -> None:
    # GIVEN a step that raises for some labels: one of them, or all after the first batches
    def step(model: Any, batch: torch.Tensor) -> None:
        if any(int(value) in bad for value in batch):
            raise IndexError("Target is out of bounds")

    data = DataSide.from_dataset(Numbers(), batch_size=4, sampler=SequentialSampler(Numbers()))
    bench = Bench(lambda: data, lambda: data, lambda: TrainingSide(train_step=step, device="cpu"), str(tmp_path))
    assert not isinstance(bench.prepare(), Failure)
    # WHEN a burst meets them
    outcome = bench.burst(LoaderConfig(), QUICK)
    # THEN a few are named, and have another batch in their place
    assert isinstance(outcome, Failure) == is_blamed
    if isinstance(outcome, Measurement):
        named = [("the step on a batch", "IndexError: Target is out of bounds")]
        assert [(each.name, each.error) for each in outcome.bad_samples] == named


class BadInWorkers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 41 and get_worker_info() is not None:
            raise LookupError("41 is held by another process")
        return super().__getitem__(index)


@pytest.mark.process
def test_what_raises_in_workers_only_is_a_failure_of_theirs(tmp_path: Path) -> None:
    probe = ProcessProbe(payload_of(BadInWorkers()), inspect_machine())
    try:
        failure = probe.burst(TWO_WORKERS, QUICK)
        alone = probe.burst(LoaderConfig(), QUICK)
    finally:
        probe.close()

    assert isinstance(failure, Failure)
    assert (failure.kind, failure.retryable) == ("user_exception", True)
    assert "sample 41 raises LookupError: 41 is held by another process in a worker" in failure.message
    assert isinstance(alone, Measurement)
    assert alone.bad_samples == ()


def test_a_bad_sample_in_the_first_batch_is_in_the_report(tmp_path: Path) -> None:
    data = side(Numbers(bad=(2,)))
    bench = Bench(lambda: data, lambda: data, lambda: TrainingSide(device="cpu"), str(tmp_path))

    report = bench.prepare()

    assert not isinstance(report, Failure)
    assert [bad.name for bad in report.bad_samples] == ["sample 2"]
