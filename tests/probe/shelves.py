"""Datasets that travel to a probe process: importable there, small, without a grain of real computing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Sleepy(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is i, after a nap."""

    def __init__(self, length: int = 64, nap_s: float = 0.0005) -> None:
        self.length = length
        self.nap_s = nap_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.nap_s)
        return torch.full((4,), float(index)), index % 2


class Failing(Sleepy):
    """Works in the main process, where the probe warms up, and raises in a worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if get_worker_info() is not None:
            raise LookupError(f"no sample {index} on this shelf")
        return super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    """0, 1, 2, ...; every worker delivers all of it unless it is sharded."""

    def __init__(self, length: int = 64, *, sharded: bool) -> None:
        self.length = length
        self.sharded = sharded

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info() if self.sharded else None
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, self.length, step):
            time.sleep(0.0005)
            yield torch.full((4,), float(index))


class RecordingStep:
    """A train_step that records the samples it saw, so that a test can ask for them afterwards."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, model: object, batch: list[torch.Tensor]) -> None:
        with Path(self.path).open("a") as file:
            file.write(",".join(str(int(value)) for value in batch[0][:, 0]) + "\n")
