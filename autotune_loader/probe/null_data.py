"""A data side that fetches nothing: workers hand over copies of one batch, so that what remains is its transport."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.step import TrainingStep

# Samples of an epoch: more than a burst takes.
LENGTH = 1 << 20
# Only a batch that lay ready tells what taking it over costs; so the loop pauses for longer than a worker takes to copy one
# and to move it to shared memory.
PAUSE_COPIES, PAUSE_S = 3.0, 0.001


class NullDataset(Dataset[None]):
    """Samples that are nothing, and take no time."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> None:
        return None

    def __getitems__(self, indices: list[int]) -> list[None]:
        return [None] * len(indices)


class CopyOf:
    """A collate function that returns the same batch each time, as a copy: what was shared once travels for free."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __call__(self, _samples: list[None]) -> Any:
        return copy.deepcopy(self._batch)


def null_data(batch: Any, samples: int) -> DataSide:
    """Batches of the same bytes and structure as `batch`, with as many samples, that cost only their copy."""
    dataset = NullDataset()
    return DataSide(
        dataset=dataset,
        batch_size=samples,
        sampler=SequentialSampler(dataset),
        collate_fn=CopyOf(batch),
        drop_last=True,
    )


def pausing_step(batch: Any) -> TrainingStep:
    """A step that only waits until the workers have copied the next batch."""
    begun = time.monotonic()
    copy.deepcopy(batch)
    pause_s = PAUSE_S + PAUSE_COPIES * (time.monotonic() - begun)
    return TrainingStep(lambda _: time.sleep(pause_s), "a pause", torch.device("cpu"), moves=False)
