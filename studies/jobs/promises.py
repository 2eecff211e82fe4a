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
