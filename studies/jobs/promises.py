"""Jobs for every kind of advice, with the change that follows it exactly: half a stage, twice the workers, no wait."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from studies.jobs.following import Case, Way
from studies.jobs.jobs import with_cache
from studies.verdict.real import BatchedTensors, OneDisk, _pairs
from studies.workloads import AccelStep, SleepDataset, StudyWorkload, cpu_bound

LENGTH = 4096
BLOCK = np.random.default_rng(0).bytes(1 << 16)


def hashed(rounds: int) -> None:
    """A fixed amount of work on one core: 64 KiB hashed so many times, without the interpreter lock."""
    for _ in range(rounds):
        hashlib.blake2b(BLOCK).digest()


class Staged(Dataset[Any]):
    """Two stages that compute and one that waits, of known length."""

    def __init__(self, unpack: int, augment: int, read_s: float = 0.0) -> None:
        self.rounds, self.read_s, self.transform = (unpack, augment), read_s, noisy

    def __len__(self) -> int:
        return LENGTH // 2

    def unpack(self) -> None:
        hashed(self.rounds[0])

    def augment(self) -> None:
        hashed(self.rounds[1])

    def fetch(self) -> None:
        time.sleep(self.read_s)

    def __getitem__(self, index: int) -> Any:
        if self.read_s:
            self.fetch()
        self.unpack()
        self.augment()
        return self.transform(torch.full((16,), float(index))), index % 10


def noisy(sample: torch.Tensor) -> torch.Tensor:
    return sample + torch.rand(1)


class Pixels(Dataset[Any]):
    """Large pictures that cost little to make: floats as ToTensor makes them."""

    def __init__(self, side: int) -> None:
        self.pixels = torch.randint(
            0, 256, (3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pixels.float().div(255)


class BytePixels(Pixels):
    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pixels.clone()


class FloatsInStep(AccelStep):
    """The same step on bytes."""

    def __call__(self, model: nn.Module, batch: Any) -> None:
        batch.float().div(255)
        super().__call__(model, batch)


def accelerated(
    dataset: Dataset[Any], step_s: float, batch_size: int = 8, step: type[AccelStep] = AccelStep
) -> StudyWorkload:
    return StudyWorkload(
        name=type(dataset).__name__,
        dataset=dataset,
        model=nn.Identity(),
        train_step=step(step_s),
        batch_size=batch_size,
        description="",
        kind="mixed",
    )


def staged(unpack: int, augment: int, read_s: float = 0.0) -> Way:
    return Way(make=lambda: accelerated(Staged(unpack, augment, read_s), 0.001))


def in_memory(batched: bool) -> StudyWorkload:
    pairs = _pairs(batched)
    assert isinstance(pairs, BatchedTensors) == batched
    return replace(accelerated(pairs, 0.0, 64), model=nn.Linear(32, 10), train_step=None)


def cases() -> list[Case]:
    """Every kind of advice that promises something."""
    two_workers = {"max_workers": 2}
    waiting = Way(make=lambda: accelerated(SleepDataset(LENGTH, 0.008), 0.0005), options=two_workers)
    disk = Way(make=lambda: accelerated(OneDisk(0.001, 0.0001), 0.001))
    cached = Way(make=lambda: accelerated(Staged(20, 10), 0.001), options={"allow": ("cache",)})
    slow = Way(make=lambda: accelerated(Staged(4, 0, 0.003), 0.001), options={"allow": ("cache",), "max_workers": 4})
    pixels = Way(make=lambda: accelerated(Pixels(512), 0.001), options={"allow": ("uint8",)})
    tail = SleepDataset(LENGTH, 0.002, 0.5, slow_every=64, slow_s=0.3)
    ordered = Way(make=lambda: accelerated(tail, 0.002), options={"max_workers": 4})
    one_core = Way(make=cpu_bound, cores=1)
    return [
        Case(
            name="two stages",
            before=staged(16, 12),
            after={"Make 'unpack' cheaper": staged(8, 12), "Make 'augment' cheaper": staged(16, 6)},
        ),
        Case(
            name="stages behind a read",
            before=staged(24, 8, 0.002),
            after={"Make 'unpack' cheaper": staged(12, 8, 0.002), "Make 'augment' cheaper": staged(24, 4, 0.002)},
        ),
        Case(name="waits", before=waiting, after={"Allow more workers": replace(waiting, options={"max_workers": 4})}),
        Case(
            name="one disk",
            before=disk,
            after={"Read larger pieces": Way(make=lambda: accelerated(OneDisk(0.0, 0.0), 0.001))},
        ),
        Case(
            name="cached", before=cached, after={"Make once": Way(make=lambda: with_cache(cached.make()))}, budget="20s"
        ),
        Case(
            name="cached waits",
            before=slow,
            after={"Make once": Way(make=lambda: with_cache(slow.make()))},
            budget="20s",
        ),
        Case(
            name="pixels",
            before=pixels,
            after={"Send pixels as bytes": Way(make=lambda: accelerated(BytePixels(512), 0.001, step=FloatsInStep))},
            budget="20s",
        ),
        Case(
            name="in memory",
            before=Way(make=lambda: in_memory(False)),
            after={"Give the dataset": Way(make=lambda: in_memory(True))},
        ),
        Case(
            name="heavy tail",
            before=ordered,
            after={"If the order of batches": replace(ordered, options={"max_workers": 4, "allow": ("in_order",)})},
        ),
        Case(
            name="one core",
            before=one_core,
            after={"Use more cores": Way(make=cpu_bound, cores=min(2, len(os.sched_getaffinity(0))))},
        ),
    ]
