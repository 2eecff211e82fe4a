"""The canaries: do workers read what they should? On real workers; every dataset here is tiny."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune_loader import tune
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.worker_checks import workers_repeat_each_other
from tests.support.bursts import warm_bench

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

RECORD_BYTES = 8


class Records(Dataset[Any]):
    """Record i of a file whose one descriptor, and so whose one position, is inherited by every forked worker."""

    def __init__(self, path: Path, is_open: bool = True) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY) if is_open else None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
        os.lseek(self.file, index * RECORD_BYTES, os.SEEK_SET)
        return torch.tensor(int.from_bytes(os.read(self.file, RECORD_BYTES), "little"))


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


def test_files_opened_on_first_use_are_not_blamed_on_the_workers(path: Path) -> None:
    data = DataSide.from_dataset(Records(path, is_open=False), batch_size=4)
    assert warm_bench(data)[1].same_in_workers


def test_workers_that_would_share_the_position_of_a_file_are_not_tried_and_that_is_said(path: Path) -> None:
    result = tune(
        Records(path), batch_size=4, budget=1, max_trials=1, max_workers=1, isolation="inline", progress=False
    )

    (warning,) = [warning for warning in result.warnings if str(path) in warning]
    assert warning.startswith("Records reads from ")
    assert result.best.num_workers == 0


class Numbers(IterableDataset[Any]):
    """Ten numbers in an order of its own, a bit changed; shared out by worker where it is asked to."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = list(range(info.id if self.sharded and info else 0, 20, 2))
        order = np.random.default_rng(drawn_from_all()).permutation(len(numbers))
        for position in order.tolist():
            yield torch.tensor(float(numbers[position])) + drawn_from_all() % 10 / 100


def drawn_from_all() -> int:
    info = get_worker_info()
    own = 0 if info is None else int(info.seed)
    return own + int(torch.randint(0, 1000, ())) + random.randrange(1000) + int(np.random.randint(1000))  # noqa: NPY002


def seed_by_worker(worker: int) -> None:
    torch.manual_seed(worker)
    random.seed(worker)
    np.random.seed(worker)  # noqa: NPY002


def test_a_stream_that_shuffles_and_augments_is_no_less_repeated() -> None:
    for sharded in (False, True):
        data = DataSide(dataset=Numbers(sharded), batch_size=4, worker_init_fn=seed_by_worker)
        assert workers_repeat_each_other(data, 0.01) is not sharded
