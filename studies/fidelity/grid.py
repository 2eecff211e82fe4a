"""What the fidelity study measures: scouts, from which the twin is fitted, and sustained runs, which it has to predict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan

WORKLOAD_NAMES = (
    "wait_light_tail",
    "wait_heavy_tail",
    "cpu_bound",
    "jpeg",
    "large_tensors",
    "in_memory",
    "step_bound",
    "short_epoch",
)
SCOUT_WORKERS = (0, 1, 2, 4, 8, 12)
"""All that any choice of three bursts may need; each fit uses three of them."""
SCOUT_PLAN = BurstPlan(max_s=3.0, min_s=0.3, relative_error=0.01)
"""A burst ends when its rate is known to 1 %, which regular workloads reach in well under a second."""
FULL = {prefetch: tuple(range(1, 13)) for prefetch in (1, 2, 4, 8)}
QUICK = {1: (2, 4, 8), 2: (1, 2, 3, 4, 6, 8, 12), 4: (2, 4, 8), 8: (1, 2, 3, 4, 6, 8, 12)}
"""Workers by prefetch: the grid thinned to what fits into a quarter of an hour."""
HEAVY_TAIL_EPOCH_S = 44.0
"""Wall seconds of one worker for all samples of `wait_heavy_tail`: a run over fewer of them is a lottery."""

AGAIN = {2: (2, 4), 8: (8,)}
"""Cells that are run again, to see how well a sustained run predicts another one of the same configuration."""
AGAIN_WORKLOADS = ("cpu_bound", "jpeg", "large_tensors", "in_memory", "wait_light_tail")

LONG_SCOUTS = 100
"""Repeats from here on are of scouts with many more batches, of the heavy tail only: what would more patience buy?"""
LONG_SCOUT_S = 12.0

Kind = Literal["scout", "sustained", "ceiling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to measure."""

    workload: str
    kind: Kind
    num_workers: int = 0
    prefetch_factor: int | None = None
    repeat: int = 0

    @property
    def config(self) -> LoaderConfig:
        return LoaderConfig(num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)

    def plan(self, seconds: float) -> BurstPlan:
        """Scouts stop when they know enough; sustained runs last as long as they are told."""
        if self.kind != "sustained":
            return BurstPlan(
                max_s=SCOUT_PLAN.max_s if self.repeat < LONG_SCOUTS else LONG_SCOUT_S,
                min_s=SCOUT_PLAN.min_s,
                relative_error=SCOUT_PLAN.relative_error,
                seed=self.repeat,
            )
        if self.workload == "wait_heavy_tail":
            seconds = max(seconds, HEAVY_TAIL_EPOCH_S / max(1, self.num_workers))
        return BurstPlan(max_s=seconds, min_s=seconds, relative_error=0.0, seed=1000 + self.repeat, deadline_s=120.0)


def tasks(*, full: bool, scout_repeats: int, again: int = 0, order: int = 0) -> list[Task]:
    """Everything to measure, in one random order over workloads, kinds and configurations; repeated cells come last."""
    chosen: list[Task] = []
    for name in WORKLOAD_NAMES:
        for repeat in range(scout_repeats):
            chosen.append(Task(workload=name, kind="ceiling", repeat=repeat))
            chosen += [_scout(name, workers, repeat) for workers in SCOUT_WORKERS]
        chosen += _sustained(name, FULL if full else QUICK)
    random.Random(order).shuffle(chosen)
    repeated = [
        replace(task, repeat=number)
        for name in AGAIN_WORKLOADS
        for task in _sustained(name, AGAIN)[1:]
        for number in range(1, again + 1)
    ]
    repeated += [
        _scout("wait_heavy_tail", workers, LONG_SCOUTS + number) for workers in (1, 4, 12) for number in range(again)
    ]
    random.Random(order).shuffle(repeated)
    return chosen + repeated


def _scout(name: str, workers: int, repeat: int) -> Task:
    return Task(workload=name, kind="scout", num_workers=workers, prefetch_factor=2 if workers else None, repeat=repeat)


def _sustained(name: str, grid: dict[int, Sequence[int]]) -> list[Task]:
    cells = [Task(workload=name, kind="sustained")]
    for prefetch, counts in grid.items():
        cells += [
            Task(workload=name, kind="sustained", num_workers=workers, prefetch_factor=prefetch) for workers in counts
        ]
    return cells
