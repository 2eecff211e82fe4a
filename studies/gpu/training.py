"""Plain training, outside the probe: what a configuration is worth to a loop that knows nothing of autotune_loader's bursts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import LoaderConfig
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.gpus import Gpus
from autotune_loader.machine.meters.process_tree import TreeMeter
from autotune_loader.pipeline.prefetch import move, prefetched_as_tuned
from studies.gpu.jobs import Job

# Batches before the clock starts: workers are up, and queues filled at the start no longer flatter.
FILLED_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One run of the loop."""

    samples_per_s: float
    gpu_util: float | None
    gpu_reason: str | None


class Loop:
    """A job's training loop on a device, with plain SGD; one for all its runs, so that it is warm.

    Args:
        job: what is trained.
        device: such as "cuda".
        seconds: of one timed run.
    """

    def __init__(self, job: Job, device: str, seconds: float) -> None:
        self.job = job
        self.device = torch.device(device)
        self.seconds = seconds
        self.model: Any = job.model.to(self.device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.cores = inspect_machine().usable_cores

    def train(self, config: LoaderConfig) -> Rate:
        """Train with the loader that `config` makes."""
        return self._timed(self._loader(config), max(1, config.num_workers) * (config.prefetch_factor or 1))

    def load(self, config: LoaderConfig) -> Rate:
        """Only load and copy, without a step: what the loader allows."""
        depth = max(1, config.num_workers) * (config.prefetch_factor or 1)
        return self._timed(self._loader(config), depth, with_step=False)

    def step(self) -> Rate:
        """Only step, on one batch that lies on the device: what the step allows."""
        batch = move(next(iter(DataLoader(self.job.dataset, **self.job.parts()))), self.device)
        return self._timed(_endless(batch), depth=4)

    def _loader(self, config: LoaderConfig) -> Iterable[Any]:
        loader: DataLoader[Any] = DataLoader(self.job.dataset, **self.job.parts(), **config.to_kwargs())
        return prefetched_as_tuned(loader, config, self.device)

    def _timed(self, batches: Iterable[Any], depth: int, with_step: bool = True) -> Rate:
        endless = _again(batches)
        for _ in range(FILLED_ROUNDS * depth + 1):
            self._take(next(endless), with_step)
        self._synchronize()
        gpus = Gpus(cuda_uuids=_uuids(self.device)) if self.device.type == "cuda" else None
        with TreeMeter(os.getpid(), gpus=gpus) as meter:
            samples, begun, opened = 0, time.perf_counter(), time.monotonic()
            while time.perf_counter() - begun < self.seconds:
                samples += self._take(next(endless), with_step)
            self._synchronize()
            rate = samples / (time.perf_counter() - begun)
        del endless
        gpu = meter.util_since(opened)
        return Rate(samples_per_s=rate, gpu_util=gpu.util, gpu_reason=gpu.reason)

    def _take(self, batch: Any, with_step: bool) -> int:
        batch = move(batch, self.device)
        if with_step:
            self.optimizer.zero_grad(set_to_none=True)
            self.job.train_step(self.model, batch).backward()
            self.optimizer.step()
        first = batch[0] if isinstance(batch, (tuple, list)) else batch
        return 1 if self.job.batch_size is None else len(first)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _endless(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


def _uuids(device: torch.device) -> list[str]:
    return [str(torch.cuda.get_device_properties(device).uuid)]
