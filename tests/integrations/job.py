"""The job of the tests of this folder: samples that are waited for, and a model that fits them."""

import time

import torch
from torch.utils.data import Dataset

SIZE, BATCH, EPOCHS = 960, 16, 3
"""Of a training in which an AutoLoader has the time to change its workers."""


class Waiting(Dataset):
    """Samples that are waited for, so that workers are worth it: (x, label, index)."""

    def __init__(self, size=SIZE, seconds=0.004):
        self.size, self.seconds = size, seconds

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((4,), index / self.size), index % 2, index


FEW = Waiting(256, 0.001)
QUICK = {"budget": 2.5, "max_workers": 3, "progress": False}
"""Enough for a handful of bursts; what is chosen does not matter, only that it is used."""


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 2), []

    def forward(self, x, labels, index):
        self.seen += index.tolist()
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples):
    """As a Trainer wants batches."""
    x, labels, index = zip(*samples, strict=True)
    return {"x": torch.stack(x), "labels": torch.tensor(labels), "index": torch.tensor(index)}


def assert_changed(loader, seen):
    """Workers came between two batches of an epoch, and every sample came once an epoch."""
    by_workers = {row.worker >= 0 for row in loader.log.rows}
    assert by_workers == {True, False}
    assert len(seen) == SIZE * EPOCHS
    for first in range(0, len(seen), SIZE):
        assert sorted(seen[first : first + SIZE]) == list(range(SIZE))
