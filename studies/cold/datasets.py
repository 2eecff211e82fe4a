"""Datasets whose first read of a sample is slow and whose later ones are not, as those of a disk behind the page cache."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

WAIT_S = 0.01
"""What the first read of a sample waits, whoever reads it."""
FILE_BYTES = 1 << 18
MARKS = "/dev/shm"


class FirstReadWaits(Dataset[torch.Tensor]):
    """A note for each sample, in memory that all processes share, says whether it was read before.

    Args:
        samples: of an epoch.
        slope: how much less the first samples of an epoch wait, and the last ones more: 1 is nothing and twice as long.
    """

    def __init__(self, samples: int, slope: float = 0.0) -> None:
        self.samples, self.slope = samples, slope
        descriptor, self.path = tempfile.mkstemp(prefix="cold-", dir=MARKS)
        os.close(descriptor)
        self._marks: np.ndarray | None = None
        self.forget()

    def forget(self) -> None:
        """As after a restart: nothing was read."""
        self._marks = None
        with Path(self.path).open("wb") as file:
            file.truncate(self.samples)

    def remove(self) -> None:
        """Leave nothing."""
        self._marks = None
        Path(self.path).unlink()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._marks is None:
            self._marks = np.memmap(self.path, np.uint8, "r+")
        if not self._marks[index]:
            self._marks[index] = 1
            time.sleep(WAIT_S * (1 + self.slope * (2 * index / self.samples - 1)))
        return torch.full((8,), float(index))


class Files(Dataset[torch.Tensor]):
    """Files of random bytes, a sample each; `forget` has the kernel drop them from memory."""

    def __init__(self, samples: int, folder: Path) -> None:
        self.paths = [str(folder / f"{number}.bin") for number in range(samples)]
        for path in self.paths:
            Path(path).write_bytes(os.urandom(FILE_BYTES))
        self.forget()

    def forget(self) -> None:
        """Evict them; what was just written goes to the disk first."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def remove(self) -> None:
        """The folder goes with what is in it."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.paths[index]).read_bytes()), dtype=torch.uint8)[:64].float()
