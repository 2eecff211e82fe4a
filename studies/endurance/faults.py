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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import SequentialSampler, get_worker_info

from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from studies.workloads import Items

FINE = 8
"""Samples, or batches, that a process reads before it may be in trouble."""
FINE_STEPS = 12
"""Steps before a process may be in trouble: it is warmed up by ten at most, and a hang there takes a start's deadline."""
BATCH_SIZE = 4
HOARD: list[bytearray] = []


class Place:
    """Code of the user's, which is in trouble from some call of its process on, if the file says so."""

    def __init__(self, path: Path, name: str, does: Callable[[Any], Any], fine: int) -> None:
        self.path, self.name, self.does, self.fine, self.calls = path, name, does, fine, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls > self.fine:
            suffer(self.path, self.name)
        return self.does(given[-1])


def sample(index: int) -> torch.Tensor:
    """4 KiB that carry their index and take a fraction of a millisecond."""
    time.sleep(0.0002)
    return torch.full((1024,), float(index))


def workload(path: Path) -> Workload:
    dataset = Items(Place(path, "getitem", sample, FINE), 100_000)
    data = DataSide.from_dataset(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=SequentialSampler(dataset),
        collate_fn=Place(path, "collate", torch.stack, FINE // BATCH_SIZE),
        worker_init_fn=Place(path, "start", int, 0),
    )
    return Workload(data=data, training=TrainingSide(train_step=Place(path, "step", len, FINE_STEPS)))


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
