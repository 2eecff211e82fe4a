"""Seven bottlenecks as real workloads in two sizes, tuned with `tune()`, then changed as advised and tuned again.

Storage is one disk that serves one request at a time, whatever process asks: a lock that all workers share and a sleep
under it. The accelerator is a step that sleeps.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from autotune_loader import TuningResult, tune
from studies.verdict.outcomes import SCALES, Outcome
from studies.workloads import AccelStep, LargeTensorDataset, SleepDataset, SpinDataset

SIZES = ("small", "large")
LENGTH = 4096


class OneDisk(Dataset[tuple[torch.Tensor, int]]):
    """Samples on a disk that serves one request at a time: each request takes `seek_s`, each sample `read_s` more."""

    def __init__(self, seek_s: float, read_s: float, *, batched: bool = False) -> None:
        self.seek_s, self.read_s = seek_s, read_s
        handle, self.lock = tempfile.mkstemp(prefix="one-disk-")
        os.close(handle)
        if batched:
            self.__getitems__ = self.read

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read([index])[0]

    def read(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        with open(self.lock, "rb") as disk:  # noqa: PTH123 - a descriptor to lock, not a file to read
            fcntl.flock(disk, fcntl.LOCK_EX)
            time.sleep(self.seek_s + self.read_s * len(indices))
        return [(torch.full((16,), float(index)), index % 10) for index in indices]


class HungryDataset(SleepDataset):
    """Waits, and holds an array of its own in every worker unless the array is shared."""

    def __init__(self, median_s: float, megabytes: int) -> None:
        super().__init__(LENGTH, median_s)
        self.megabytes = megabytes
        self.held: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.held is None:
            self.held = np.ones(self.megabytes << 17)
        return super().__getitem__(index)


class BatchedTensors(TensorDataset):
    """A TensorDataset that gathers a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(tensor[indices].unbind() for tensor in self.tensors), strict=True))


class ByteTensors(LargeTensorDataset):
    """The same samples in a quarter of the bytes."""

    def __init__(self, length: int, sample_bytes: int) -> None:
        super().__init__(length, sample_bytes)
        self.sample = (self.sample * 255).to(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `tune()` is called with."""

    dataset: Dataset[Any]
    step_s: float | None
    """Seconds of the accelerator's step; None trains a small linear model."""
    batch_size: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    def tune(self, budget: str) -> TuningResult:
        model = nn.Linear(32, 10) if self.step_s is None else nn.Identity()
        step = {} if self.step_s is None else {"train_step": AccelStep(self.step_s)}
        return tune(
            self.dataset,
            model,
            batch_size=self.batch_size,
            budget=budget,
            reuse=False,
            progress=False,
            **step,
            **self.options,
        )


def _pairs(batched: bool) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tensors = torch.rand((65536, 32), generator=generator), torch.randint(0, 10, (65536,), generator=generator)
    return (BatchedTensors if batched else TensorDataset)(*tensors)


def _jobs(size: str) -> dict[str, tuple[tuple[str, ...], Callable[[], Job], Callable[[], Job]]]:
    """By bottleneck: what counts as right, the job, and the job after the advice."""
    scale = SCALES[size]
    room = {"max_host_memory": "2500MB"}
    return {
        "cpu": (
            ("cpu",),
            lambda: Job(dataset=SpinDataset(LENGTH, 40 * scale), step_s=0.002),
            lambda: Job(dataset=SpinDataset(LENGTH, 20 * scale), step_s=0.002),
        ),
        "wait": (
            ("wait",),
            lambda: Job(dataset=SleepDataset(LENGTH, 0.008 * scale), step_s=0.0005),
            lambda: Job(dataset=SleepDataset(LENGTH, 0.008 * scale), step_s=0.0005, options={"max_workers": 32}),
        ),
        "storage": (
            ("wait",),
            lambda: Job(dataset=OneDisk(0.001 * scale, 0.0001 * scale), step_s=0.001),
            lambda: Job(dataset=OneDisk(0.001 * scale, 0.0001 * scale, batched=True), step_s=0.001),
        ),
        "transport": (
            ("transport",),
            lambda: Job(dataset=LargeTensorDataset(LENGTH, scale << 20), step_s=0.0002),
            lambda: Job(dataset=ByteTensors(LENGTH, scale << 20), step_s=0.0002),
        ),
        "step": (
            ("step",),
            lambda: Job(dataset=SleepDataset(LENGTH, 0.0005), step_s=0.03 * scale),
            lambda: Job(dataset=SleepDataset(LENGTH, 0.0005), step_s=0.015 * scale),
        ),
        "memory": (
            ("memory",),
            lambda: Job(dataset=HungryDataset(0.01 * scale, 500), step_s=0.0005, options=room),
            lambda: Job(dataset=HungryDataset(0.01 * scale, 5), step_s=0.0005, options=room),
        ),
        "in-memory": (
            ("in_memory",),
            lambda: Job(dataset=_pairs(False), step_s=None, batch_size=64 * scale),
            lambda: Job(dataset=_pairs(True), step_s=None, batch_size=64 * scale),
        ),
    }


INJECTED = tuple(_jobs("small"))


def study(injected: str, size: str, budget: str) -> Outcome:
    expected, before, after = _jobs(size)[injected]
    result, later = before().tune(budget), after().tune(budget)
    rates = [each.measured.samples_per_s for each in (result, later)]
    assert rates[0] is not None
    assert rates[1] is not None
    first = result.advice[0] if result.advice else None
    outcome = Outcome(
        injected=injected,
        expected=expected,
        size=size,
        verdict=result.verdict.binding,
        best=str(result.best),
        samples_per_s=rates[0].value,
        advice=first.action if first else None,
        promised=first.expected_gain if first else None,
        gain=rates[1].value / rates[0].value - 1,
    )
    print(f"{injected:10} {size}: {outcome.verdict}, {outcome.gain:+.0%}. {result.verdict.sentence}", flush=True)
    for advice in result.advice:
        gain = "" if advice.expected_gain is None else f" ({advice.expected_gain:+.0%})"
        print(f"    {advice.action}{gain}: {advice.reason}", flush=True)
    return outcome
