"""What can go wrong in a burst, as a workload that reads its next fault from a file.

The process of the bursts lives through many of them; a file is how the next fault reaches it and its workers. The first
batches are always fine, because a new process fetches one of them before anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset, SequentialSampler, get_worker_info

from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload

FINE = 8
"""Samples, or batches, that a process reads before it may be in trouble."""
BATCH_SIZE = 4
HOARD: list[bytearray] = []


class Healthy(Dataset[torch.Tensor]):
    """Samples of 4 KiB that carry their index and take a fraction of a millisecond."""

    def __init__(self, path: Path, length: int = 100_000) -> None:
        self.path, self.length, self.read = path, length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0002)
        self.read += 1
        if self.read > FINE:
            suffer(self.path, "getitem")
        return torch.full((1024,), float(index))


class Collate:
    def __init__(self, path: Path) -> None:
        self.path, self.made = path, 0

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.made += 1
        if self.made > FINE // BATCH_SIZE:
            suffer(self.path, "collate")
        return torch.stack(samples)


class WorkerInit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, worker: int) -> None:
        suffer(self.path, "start")


class Step:
    def __init__(self, path: Path) -> None:
        self.path, self.done = path, 0

    def __call__(self, model: Any, batch: torch.Tensor) -> None:
        self.done += 1
        if self.done > FINE // BATCH_SIZE:
            suffer(self.path, "step")


def workload(path: Path) -> Workload:
    dataset = Healthy(path)
    data = DataSide.from_dataset(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=SequentialSampler(dataset),
        collate_fn=Collate(path),
        worker_init_fn=WorkerInit(path),
    )
    return Workload(data=data, training=TrainingSide(train_step=Step(path)))


def suffer(path: Path, place: str) -> None:
    """Do what the file says, if it says it of this place: `getitem kill`, or `getitem-worker kill` in workers alone."""
    where, _, what = path.read_text().partition(" ")
    here = {place, f"{place}-{'worker' if get_worker_info() is not None else 'main'}"}
    if where in here:
        FAULTS[what]()


def _raise(error: Exception) -> NoReturn:
    raise error


def _hold_memory() -> None:
    time.sleep(0.01)
    HOARD.append(bytearray(os.urandom(1 << 16) * 256))  # 16 MiB that nobody shares
    if len(HOARD) > 256:
        os._exit(9)  # the guard did not see 4 GiB


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "nap": lambda: time.sleep(0.4),
    "write": lambda: Path("last.pt").write_text("a checkpoint"),
    "save": lambda: torch.save({}, "last.pt"),
    "socket": lambda: socket.create_connection(("127.0.0.1", 1)),
    "raise": lambda: _raise(LookupError("an unreadable sample")),
    "oom": lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "host-oom": lambda: _raise(MemoryError()),
    "files": lambda: _raise(OSError(24, "Too many open files")),
    "shm": lambda: _raise(RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hoard": _hold_memory,
}

# What is injected how often, by weight; and the kinds of outcome that are right. A write that is refused is one of its own.
MIX: tuple[tuple[str, float, frozenset[str]], ...] = (
    ("none", 28, frozenset({"ok"})),
    ("getitem-worker kill", 8, frozenset({"oom_killed"})),
    ("getitem-worker exit", 6, frozenset({"crashed"})),
    ("getitem-worker segfault", 6, frozenset({"crashed"})),
    ("collate-worker kill", 3, frozenset({"oom_killed"})),
    ("getitem-worker interrupt", 2, frozenset({"crashed", "deadline", "ok"})),
    ("getitem write", 3, frozenset({"writes"})),
    ("getitem-worker write", 2, frozenset({"writes"})),
    ("step save", 3, frozenset({"writes"})),
    ("collate save", 2, frozenset({"writes"})),
    ("getitem socket", 2, frozenset({"user_exception"})),
    ("getitem-worker socket", 2, frozenset({"user_exception"})),
    ("getitem raise", 7, frozenset({"user_exception"})),
    ("collate raise", 6, frozenset({"user_exception"})),
    ("step raise", 6, frozenset({"user_exception"})),
    ("start raise", 3, frozenset({"user_exception"})),
    ("start nap", 3, frozenset({"ok"})),
    ("start kill", 2, frozenset({"oom_killed"})),
    ("step oom", 5, frozenset({"device_memory"})),
    ("getitem host-oom", 2, frozenset({"out_of_memory"})),
    ("getitem-worker files", 1, frozenset({"descriptors"})),
    ("getitem-worker shm", 1, frozenset({"shared_memory"})),
    ("getitem-worker hang", 2.5, frozenset({"deadline"})),
    ("collate-worker hang", 1.5, frozenset({"deadline"})),
    ("step hang", 1, frozenset({"deadline"})),
    ("start hang", 1, frozenset({"deadline"})),
    ("step segfault", 1.5, frozenset({"crashed"})),
    ("step kill", 1, frozenset({"oom_killed"})),
    ("step exit", 1, frozenset({"crashed"})),
    ("getitem-worker hoard", 1.5, frozenset({"memory_guard"})),
)
