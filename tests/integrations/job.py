"""The job of the tests of this folder: samples that are waited for, a model that fits them, and what a live change shows."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import Dataset

from autotune_loader import AutoLoader

SIZE, BATCH, EPOCHS = 960, 16, 3
"""Of a training in which an AutoLoader has the time to change its workers."""


class Waiting(Dataset[Any]):
    """Samples that are waited for, so that more than two workers are worth it: (x, label, index)."""

    def __init__(self, size: int = SIZE, seconds: float = 0.004) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        time.sleep(self.seconds)
        return torch.full((4,), index / self.size), index % 2, index


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Any:
        self.seen += index.tolist()
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """As a Trainer wants batches."""
    x, labels, index = zip(*samples, strict=True)
    return {"x": torch.stack(x), "labels": torch.tensor(labels), "index": torch.tensor(index)}


def assert_changed(loader: AutoLoader[Any], seen: list[int]) -> None:
    """It changed its workers between two batches of an epoch, and every sample came once an epoch."""
    assert len({row.worker < 0 for row in loader.log.rows}) == 2  # some are the loop's, some are of workers
    assert [sorted(seen[first : first + SIZE]) for first in range(0, len(seen), SIZE)] == [list(range(SIZE))] * EPOCHS
