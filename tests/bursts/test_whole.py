"""What a dataset holds, or does when it is finalised, is as it was after bursts have read copies of it, or forks."""

from __future__ import annotations

import gc
import multiprocessing
import re
import socket
import sqlite3
import weakref
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import ALONE, ONE_WORKER, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]
LENGTH = 64


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i; a careless copy would break the folder, or what is made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(self.read(index)))

    def read(self, index: int) -> Any:
        return index


class RemovesItsFiles(Numbers):
    """When it is finalised."""

    def __del__(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def read(self, index: int) -> Any:
        return (self.folder / f"{index}").read_text()


class OneOpenFile(Numbers):
    """Every forked worker would share its position: the next line is read where the last one ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "lines").write_text("".join(f"{number}\n" for number in range(100_000)))
        self.lines = (folder / "lines").open("rb", buffering=0)
        weakref.finalize(self, self.lines.close)

    def read(self, index: int) -> Any:
        return self.lines.readline() and index


class OverAConnection(Numbers):
    """To a database, which SQLite forbids to carry across a fork."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.database = sqlite3.connect(folder / "numbers.db", check_same_thread=False)
        weakref.finalize(self, self.database.close)

    def read(self, index: int) -> Any:
        return self.database.execute("SELECT ?", (index,)).fetchone()[0]


class InSharedMemory(Numbers):
    """Each process attaches to it by its name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.memory = SharedMemory(create=True, size=LENGTH)
        weakref.finalize(self, self.memory.unlink)

    def __getstate__(self) -> Any:
        return {"folder": self.folder, "name": self.memory.name}

    def read(self, index: int) -> Any:
        self.memory = vars(self).get("memory") or SharedMemory(vars(self)["name"])
        return index


class Counts(Numbers):
    """In a value that processes share and that cannot be pickled, in a mapped file, and in what it has cached."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cache: dict[int, bool] = {}
        self.count = multiprocessing.Value("l", 0)
        self.counts = np.memmap(folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))

    def read(self, index: int) -> Any:
        with self.count.get_lock():
            self.count.value += 1
            self.counts[index] += 1
        self.cache[index] = True
        return index


@pytest.mark.parametrize(
    ("kind", "is_as_before", "may_have_workers", "says"),
    [
        (RemovesItsFiles, lambda dataset: len(list(dataset.folder.iterdir())) == LENGTH, True, ""),
        (OneOpenFile, lambda dataset: dataset.lines.readline() == b"0\n", False, "would share its position"),
        (OverAConnection, lambda dataset: dataset.read(3) == 3, False, "dataset.database is an open Connection"),
        (InSharedMemory, lambda dataset: Path("/dev/shm", dataset.memory.name).exists(), True, ""),
        (
            Counts,
            lambda dataset: not (dataset.count.value or dataset.counts.any() or dataset.cache),
            True,
            "in forks of",
        ),
    ],
)
def test_a_dataset_is_as_it_was(
    kind: type[Numbers], is_as_before: Callable[[Any], bool], may_have_workers: bool, says: str, tmp_path: Path
) -> None:
    for number in range(LENGTH):
        (tmp_path / f"{number}").write_text(str(number))
    dataset = kind(tmp_path)
    # WHEN bursts read from it, with workers where these are right
    with opened(workload(dataset)) as probe:
        for config in (ALONE, ONE_WORKER, ALONE) if may_have_workers else (ALONE, ALONE):
            measured(probe.probe, config)
    gc.collect()
    # THEN it is as before, and it was found out whether workers read the same
    assert is_as_before(dataset)
    assert (probe.warmup.most_workers is None) is may_have_workers, probe.notes
    assert re.search(says, " ".join(probe.notes))


class OverASocket(Numbers):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.socket, self.other = socket.socketpair()

    def read(self, index: int) -> Any:
        self.socket.send(b"7")
        return self.other.recv(1).decode()


def test_what_no_other_process_can_read_is_named(tmp_path: Path) -> None:
    dataset = OverASocket(tmp_path)
    says = r"^dataset\.socket cannot be taken to another process .*make it on first use in each process"
    with dataset.socket, dataset.other:
        with pytest.raises(WorkloadError, match=says), opened(workload(dataset)):
            pass
        assert dataset.read(0) == "7"  # nobody has taken anything of it
