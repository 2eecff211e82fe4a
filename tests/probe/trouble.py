"""A dataset that makes trouble of the kind that a file names, so that one probe process can be put through all of it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset, get_worker_info

FIRST_BATCHES_ARE_FINE = 20
HOARD: list[bytearray] = []


class Trouble(Dataset[torch.Tensor]):
    """Fine in the main process, unless the trouble says "main"; in a worker in trouble from index 20 on."""

    def __init__(self, path: Path, length: int = 4096, nap_s: float = 0.001) -> None:
        self.path = path
        self.length = length
        self.nap_s = nap_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.nap_s)
        trouble = self.path.read_text()
        where, _, what = trouble.partition(":")
        if what and index >= FIRST_BATCHES_ARE_FINE and (where == "worker") == (get_worker_info() is not None):
            TROUBLES[what]()
        return torch.zeros(4)


def _raise(error: BaseException) -> None:
    raise error


def _hold_memory() -> None:
    HOARD.append(bytearray(os.urandom(1 << 16) * 256))  # 16 MiB that nobody shares


def _allocate_too_much() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    torch.empty(64 << 30, dtype=torch.uint8)


CUDA_FORK = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use 'spawn'"

TROUBLES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "cuda": lambda: _raise(RuntimeError(CUDA_FORK)),
    "oom": lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "allocate": _allocate_too_much,
    "files": lambda: _raise(OSError(24, "Too many open files")),
    "hoard": _hold_memory,
}
