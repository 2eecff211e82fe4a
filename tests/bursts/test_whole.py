"""What a dataset holds, or does when it is finalised, is as it was after bursts have read copies of it, or forks."""

from __future__ import annotations

import gc
import multiprocessing
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded import PreloadedPython
from torch.utils.data import Dataset

from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import ALONE, ONE_WORKER, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]
LENGTH = 64


class Fragile(Dataset[torch.Tensor]):
    """Samples in a folder of files, and something that a careless copy would break."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(LENGTH):
            (folder / f"{number}").write_text(str(number))
        self.open()

    def open(self) -> None:
        """Make what is fragile."""

    def close(self) -> None:
        """The end of the user's program."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(self.read(index)))

    def read(self, index: int) -> str | bytes:
        return (self.folder / f"{index}").read_text()


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


class RemovedAtItsEnd(Fragile):
    def open(self) -> None:
        weakref.finalize(self, remove, self.folder)

    def __reduce__(self) -> Any:
        return RemovedAtItsEnd, (self.folder,)

    def __init__(self, folder: Path) -> None:
        if not (folder / "0").exists():
            super().__init__(folder)
        self.folder = folder

    def __del__(self) -> None:
        remove(self.folder)


class OneOpenFile(Fragile):
    """Its position must not move, and every forked worker would share it: the next line is read where the last one ended."""

    def open(self) -> None:
        (self.folder / "lines").write_text("".join(f"{number}\n" for number in range(100_000)))
        self.lines = (self.folder / "lines").open("rb", buffering=0)
        self.lines.readline()

    def close(self) -> None:
        self.lines.close()

    def read(self, index: int) -> str:
        self.lines.readline()
        return str(index)


class InSharedMemory(Fragile):
    """Each process attaches to it by its name."""

    def open(self) -> None:
        self.memory = SharedMemory(create=True, size=LENGTH)

    def close(self) -> None:
        self.memory.close()
        self.memory.unlink()

    def __getstate__(self) -> Any:
        return {"folder": self.folder, "name": self.memory.name}

    def read(self, index: int) -> str | bytes:
        if "memory" not in vars(self):
            self.memory = SharedMemory(vars(self)["name"])
        return super().read(index)


class OverASocket(Fragile):
    """A server in a thread answers each number with itself."""

    def open(self) -> None:
        self.socket, other = socket.socketpair()
        threading.Thread(target=self.serve, args=(other,), daemon=True).start()

    def close(self) -> None:
        self.socket.close()

    @staticmethod
    def serve(other: socket.socket) -> None:
        with other:
            while asked := other.recv(64):
                other.send(asked)

    def read(self, index: int) -> str:
        self.socket.send(f"{index}".encode())
        if not (answer := self.socket.recv(64).decode()):
            raise ConnectionError("the server is gone")
        return answer


class CountsInMemory(Fragile):
    """In a value that processes share, in a mapped file, and in what it has cached."""

    def open(self) -> None:
        self.cache: dict[int, bool] = {}
        self.count = multiprocessing.Value("l", 0)  # which cannot be pickled
        self.counts = np.memmap(self.folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))

    def read(self, index: int) -> str | bytes:
        with self.count.get_lock():
            self.count.value += 1
            self.counts[index] += 1
        self.cache[index] = True
        return super().read(index)


def is_whole(dataset: Any) -> bool:
    return [float(dataset[index]) for index in range(LENGTH)] == [float(number) for number in range(LENGTH)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[type[Fragile]], Any]]:
    made: list[Fragile] = []

    def make_it(kind: type[Fragile]) -> Any:
        (tmp_path / kind.__name__).mkdir()
        made.append(kind(tmp_path / kind.__name__))
        return made[-1]

    yield make_it
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kind", "is_as_before", "may_have_workers", "says"),
    [
        (RemovedAtItsEnd, is_whole, True, ""),
        (
            OneOpenFile,
            lambda dataset: dataset.lines.readline() == b"1\n",
            False,
            "would share its position.*num_workers=0",
        ),
        (InSharedMemory, lambda dataset: Path("/dev/shm", dataset.memory.name).exists(), True, ""),
        (
            CountsInMemory,
            lambda dataset: not (dataset.count.value or dataset.counts.any() or dataset.cache),
            True,
            "in forks of this process",
        ),
    ],
)
def test_a_dataset_is_as_it_was(
    make: Callable[[type[Fragile]], Any],
    kind: type[Fragile],
    is_as_before: Callable[[Any], bool],
    may_have_workers: bool,
    says: str,
) -> None:
    dataset = make(kind)
    # WHEN bursts read from it, with workers where these are right
    with opened(workload(dataset)) as probe:
        for config in (ALONE, ONE_WORKER, ALONE) if may_have_workers else (ALONE, ALONE):
            measured(probe.probe, config)
    gc.collect()
    # THEN it is as before, and it was found out whether workers read the same
    assert is_as_before(dataset)
    assert (probe.warmup.same_in_workers and not probe.warmup.reads_by_itself) is may_have_workers, probe.notes
    assert re.search(says, " ".join(probe.notes))


def test_what_no_other_process_can_read_is_named(make: Callable[[type[Fragile]], Any]) -> None:
    dataset = make(OverASocket)
    says = r"^dataset\.socket cannot be taken to another process .*make it on first use in each process"
    with pytest.raises(WorkloadError, match=says), opened(workload(dataset)):
        pass
    assert is_whole(dataset)


BATCHES = """
import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from tests.support.bursts import measured, opened, workload

class Split(enum.Enum):
    TRAIN = "train"

@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor

class Outer:
    class Batch(NamedTuple):
        x: Frozen
        split: Split

def collate(samples):
    return Outer.Batch(Frozen(torch.stack(samples)), Split.TRAIN)

def step(model, batch):
    assert isinstance(batch, Outer.Batch) and isinstance(batch.x, Frozen) and batch.split is Split.TRAIN

with opened(workload(torch.rand(64, 4), 8, TrainingSide(train_step=step), collate_fn=collate)) as probe:
    for method in ("fork", "spawn"):
        measured(probe.probe, LoaderConfig(num_workers=1, multiprocessing_context=method))
        print(method)
"""


def test_batches_of_classes_of_a_script_without_a_guard_come_out_of_workers(
    tmp_path: Path, preloaded: PreloadedPython
) -> None:
    (tmp_path / "train.py").write_text(BATCHES)
    run = preloaded.start("train.py", folder=tmp_path)
    assert run.wait(timeout=110) == 0, run.output
    assert run.output.split() == ["fork", "spawn"]
