"""Workloads that meet the limits of their machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from autotune_loader.pipeline.workload import DataSide

LOCK = threading.Lock()
KEPT: list[Any] = []


class Large(Dataset[torch.Tensor]):
    """Samples of 2 MiB."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 << 19)


class Small(Large):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


class Locking(Large):
    """Takes a lock that another thread of the main process holds most of the time, as a logger or OpenMP may."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is None:
            threading.Thread(target=hold_on, daemon=True).start()
            time.sleep(0.01)
        else:
            LOCK.acquire()
        return torch.zeros(4)


def hold_on() -> None:
    if LOCK.acquire(blocking=False):
        time.sleep(60)


def as_list(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(samples)]


def never_done(samples: list[torch.Tensor]) -> torch.Tensor:
    if get_worker_info() is not None:
        time.sleep(3600)
    return torch.stack(samples)


def apart(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sample.clone() for sample in samples]


def keep(model: Any, batch: Any) -> None:
    KEPT.append(batch)


def data_side(case: str) -> DataSide:
    dataset = {"lock": Locking, "descriptors": Small, "collate": Small}.get(case, Large)()
    collate_fn = {"custom_collate": as_list, "collate": never_done, "descriptors": apart}.get(case)
    return DataSide.from_dataset(dataset, batch_size=4, collate_fn=collate_fn)


def step(case: str) -> Callable[[Any, Any], None] | None:
    return keep if case == "descriptors" else None
