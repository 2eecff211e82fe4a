"""The workloads that all studies share, so that their figures can be compared; `README.md` says what binds in each.

Everything here is an importable class or function, so that any start method can send it to another process. The sizes
suit a machine with a handful of cores; a study that needs others builds its own `StudyWorkload` and says so.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune_loader.bursts.parent import OpenProbe, open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.tuning.arguments import make_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyWorkload:
    """A training job whose bottleneck is known."""

    dataset: Dataset[Any]
    batch_size: int | None
    """None where the dataset delivers batches."""
    model: nn.Module
    train_step: Callable[[nn.Module, Any], Any] | None = None
    """None leaves it to `tune()` to infer the step from model and batch."""

    def parts(self) -> dict[str, Any]:
        """DataLoader's arguments that are not tuned."""
        shuffled = {} if self.batch_size is None else {"shuffle": True, "drop_last": True}
        return {"batch_size": self.batch_size, **shuffled}

    def loader(self, **config: Any) -> DataLoader[Any]:
        """The loader that `tune()` is given, or one with settings."""
        return DataLoader(self.dataset, **self.parts(), **config)


def opened(study: StudyWorkload, device: str = "cpu") -> AbstractContextManager[OpenProbe]:
    """A warm probe of the workload as `tune()` would make it."""
    job = make_workload(study.loader(), study.model, train_step=study.train_step, device=device)
    return open_probe(job, inspect_machine(), None)


class AccelStep:
    """A training step on an accelerator, seen from the host: the CPU is free while it lasts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, model: nn.Module, batch: Any) -> None:
        time.sleep(self.seconds)


class Items(Dataset[Any]):
    """A function of the index."""

    def __init__(self, get: Callable[[int], Any], length: int) -> None:
        self.get, self.length = get, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def sleeping(length: int, median_s: float, sigma: float = 0.0, slow_s: float = 0.0) -> Dataset[Any]:
    """Samples that are waited for, as from remote storage, and cost no CPU: lognormal waits, each index always the same.

    Every 32nd takes `slow_s`, where that is given.
    """
    waits_s = median_s * np.exp(sigma * np.random.default_rng(0).standard_normal(length))
    waits_s[31::32] = slow_s or waits_s[31::32]
    return Items(partial(sleep, waits_s), length)


def sleep(waits_s: np.ndarray, index: int) -> tuple[torch.Tensor, int]:
    time.sleep(waits_s[index])
    return torch.full((16,), float(index)), index % 10


def spin(rounds: int, block: bytes, index: int) -> tuple[torch.Tensor, int]:
    """A fixed amount of work on one core, with no thread pool involved: `rounds` hashes of a block."""
    digest = index.to_bytes(8, "little")
    for _ in range(rounds):
        digest = hashlib.blake2b(block, key=digest[:64]).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).float(), index % 10


def turn(turns: int, index: int) -> tuple[torch.Tensor, int]:
    """A loop in Python, as augmentations written by hand are."""
    total = index
    for number in range(turns):
        total = (total * 31 + number) & 0xFFFF
    return torch.full((64,), float(total)), index % 10


def accelerated(dataset: Dataset[Any], batch_size: int, step_s: float) -> StudyWorkload:
    """Behind a step of an accelerator."""
    return StudyWorkload(dataset=dataset, batch_size=batch_size, model=nn.Identity(), train_step=AccelStep(step_s))


def jpeg() -> StudyWorkload:
    from studies.pictures import BATCH_SIZE, JpegFolder, SmallCnn, cache_folder, make_jpegs

    make_jpegs(cache_folder())
    return StudyWorkload(dataset=JpegFolder(cache_folder()), batch_size=BATCH_SIZE, model=SmallCnn())


def in_memory() -> StudyWorkload:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand((65536, 32), generator=generator)
    labels = torch.randint(0, 10, (65536,), generator=generator)
    return StudyWorkload(dataset=TensorDataset(pictures, labels), batch_size=64, model=nn.Linear(32, 10))


def cpu_bound() -> StudyWorkload:
    return accelerated(Items(partial(spin, 50, np.random.default_rng(0).bytes(1 << 16)), 4096), 8, 0.005)


WORKLOADS: dict[str, Callable[[], StudyWorkload]] = {
    "wait_light_tail": lambda: accelerated(sleeping(4096, 0.004, sigma=0.2), 8, 0.004),
    "wait_heavy_tail": lambda: accelerated(sleeping(4096, 0.002, sigma=0.8, slow_s=0.2), 8, 0.004),
    # More workers than a multiple of a few cores would allow are best: 128 ms of waiting a batch over a step of 12 ms.
    "wait_behind_step": lambda: accelerated(sleeping(4096, 0.004), 32, 0.012),
    "cpu_bound": cpu_bound,
    "python_loops": lambda: accelerated(Items(partial(turn, 20_000), 4096), 16, 0.010),
    "jpeg": jpeg,
    "in_memory": in_memory,
    # 8 s of waiting a batch over a step of 0.3 s: 27 workers keep up.
    "slow_batches": lambda: accelerated(sleeping(4096, 0.5), 16, 0.3),
}
