"""A dataset that makes trouble of the kind that a file names, so that one probe can be put through all of it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset, get_worker_info

HOARD: list[bytearray] = []


class Trouble(Dataset[torch.Tensor]):
    """In trouble after `fine` samples, in a worker or in the main process: the file says, say, "worker:kill"."""

    def __init__(self, path: Path, nap_s: float = 0.001, fine: int = 20) -> None:
        self.path, self.nap_s, self.fine = path, nap_s, fine
        self.read, self.said = 0, ""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.nap_s)
        said = self.path.read_text()
        self.read = 0 if said != self.said else self.read + 1
        self.said = said
        where, _, what = said.partition(":")
        if what and self.read >= self.fine and (where == "worker") == (get_worker_info() is not None):
            TROUBLES[what]()
        return torch.zeros(4)


def _raise(error: BaseException) -> None:
    raise error


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
    "hoard": lambda: HOARD.append(bytearray(os.urandom(1 << 16) * 256)),  # 16 MiB that nobody shares
}
