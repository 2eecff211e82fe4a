"""The canaries: do workers read what they should? On real workers; every dataset here is tiny."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, get_worker_info

from autotune_loader import tune
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.probe.worker_checks import workers_repeat_each_other

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

RECORD_BYTES = 8
SAMPLE_S = 0.002


class Records(Dataset[Any]):
    """Record i of a file whose one descriptor, and so whose one position, is inherited by every forked worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(read_record(self.file, index))


def read_record(file: int, index: int) -> int:
    os.lseek(file, index * RECORD_BYTES, os.SEEK_SET)
    time.sleep(SAMPLE_S)  # where the other worker moves it
    return int.from_bytes(os.read(file, RECORD_BYTES), "little")


class OpenedOnFirstUse(Records):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[int, int] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() not in self.files:
            self.files[os.getpid()] = os.open(self.path, os.O_RDONLY)
        return torch.tensor(read_record(self.files[os.getpid()], index))


class Augmented(Dataset[Any]):
    """Random, from the generators that torch seeds in each worker."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), np.random.rand(2), index  # noqa: NPY002


class AugmentedByItself(Augmented):
    """Random now and then, from a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return index + (self.random.random() < 0.2)


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            raise LookupError("not in a worker")
        return index


@pytest.fixture(autouse=True)
def _workers_are_forked() -> Iterator[None]:
    """A handle is inherited by a fork alone, which is not the default from Python 3.14 on."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    path.write_bytes(b"".join(number.to_bytes(RECORD_BYTES, "little") for number in range(64)))
    return path


def prepared(dataset: Any, **parts: Any) -> WarmupReport:
    data = DataSide.from_dataset(dataset, batch_size=4, **parts)
    report = Bench(lambda: data, lambda: data, TrainingSide()).prepare()
    assert isinstance(report, WarmupReport)
    return report


def test_workers_that_share_the_position_of_a_file_are_found_out(path: Path) -> None:
    assert not prepared(Records(path)).same_in_workers
    assert not prepared(Records(path), sampler=SequentialSampler(range(64))).same_in_workers
    assert not prepared(Records(path), worker_init_fn=seed_by_worker).same_in_workers


def test_a_file_that_each_worker_opens_is_no_trouble(path: Path) -> None:
    assert prepared(OpenedOnFirstUse(path)).same_in_workers


@pytest.mark.parametrize(
    "dataset",
    [Augmented(), AugmentedByItself(), Failing(), list(range(64))],
    ids=lambda dataset: type(dataset).__name__,
)
def test_random_failing_and_plain_data_are_not_blamed_on_the_workers(dataset: Any) -> None:
    assert prepared(dataset).same_in_workers


def test_the_result_warns_of_it_and_names_the_dataset(path: Path) -> None:
    result = tune(
        Records(path), batch_size=4, budget=1, max_trials=1, max_workers=1, isolation="inline", progress=False
    )

    (warning,) = [warning for warning in result.warnings if str(path) in warning]
    assert warning.startswith("Records reads from ")
    assert result.best.num_workers == 0
    assert "open it on first use" in warning


class Numbers(IterableDataset[Any]):
    """Ten numbers in an order of its own, a bit changed; shared out by worker where it is asked to."""

    def __init__(self, draw: Callable[[], int], sharded: bool) -> None:
        self.draw = draw
        self.sharded = sharded

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = list(range(info.id if self.sharded and info else 0, 20, 2))
        order = np.random.default_rng(self.draw()).permutation(len(numbers))
        for position in order.tolist():
            yield torch.tensor(float(numbers[position])) + self.draw() % 10 / 100


def drawn_by_workers_seed() -> int:
    info = get_worker_info()
    return 0 if info is None else int(info.seed)


def seed_by_worker(worker: int) -> None:
    torch.manual_seed(worker)
    random.seed(worker)
    np.random.seed(worker)  # noqa: NPY002


@pytest.mark.parametrize("worker_init_fn", [None, seed_by_worker])
@pytest.mark.parametrize(
    "draw",
    [
        lambda: int(torch.randint(0, 1000, ())),
        lambda: random.randrange(1000),
        lambda: int(np.random.randint(1000)),  # noqa: NPY002
        drawn_by_workers_seed,
    ],
    ids=["torch", "python", "numpy", "worker seed"],
)
def test_a_stream_that_shuffles_and_augments_is_no_less_repeated(draw: Any, worker_init_fn: Any) -> None:
    repeats = [
        workers_repeat_each_other(
            DataSide(dataset=Numbers(draw, sharded), batch_size=4, worker_init_fn=worker_init_fn), 0.01
        )
        for sharded in (False, True)
    ]

    assert repeats == [True, False]
