"""Are shares of a sample's wall seconds right where workers are more than cores?

The share of wall seconds of each stage in truth, and in bursts such as those of a search. The truth is what the first job says
of its own stages, among these; of the others, what bursts of one worker show.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from autotune_loader.tuning.bursting import SEARCH_BURST
from autotune_loader.values import LoaderConfig
from autotune_loader.values.trace import pooled, stage_times
from studies.study import Row, Table
from studies.workloads import Items, StudyWorkload, accelerated, jpeg, opened

NUMBERS, MOST_POINTS = np.eye(300), 5.0
BAR = "the largest error of a share is 5 points"


class Steps(list[Callable[[Any], Any]]):
    """Functions of a sample, one after the other: each is a stage."""

    def __call__(self, sample: Any) -> Any:
        return reduce(lambda made, step: step(made), self, sample)


def wait(sample: Any) -> Any:
    return time.sleep(0.002) or sample


def compute(sample: Any, cpu_s: float = 0.001) -> Any:
    end = time.thread_time() + cpu_s
    return next(sample for _ in iter(int, 1) if time.thread_time() >= end)


def decode(sample: Any) -> Any:
    return compute(sample, 0.003)


def multiply(sample: Any) -> Any:
    return float((NUMBERS @ NUMBERS)[0, 0]) + sample


def job(*steps: Callable[[Any], Any]) -> StudyWorkload:
    return accelerated(Items(Steps(steps), 4096), 8, 0.002)


def shares(probe: Any, workers: Sequence[int]) -> dict[str, float]:
    bursts = [probe.burst(LoaderConfig().with_workers(each, 2), replace(SEARCH_BURST, stages=True)) for each in workers]
    return {each.stage: each.wall_share for each in stage_times(pooled(each.stages for each in bursts))}


TRUTH = {"wait": 2 / 6, "decode": 3 / 6, "compute": 1 / 6}
JOBS = {"computes": job(wait, decode, compute), "waits": job(wait), "numpy": job(wait, multiply), "jpeg": jpeg()}


def rows(*, only: str = "", runs: int = 3, quick: bool = False) -> Table:
    for name, workload in JOBS.items():
        if only not in name or (quick and name != "waits"):
            continue
        with opened(workload) as warm:
            for number in range(1 if quick else runs):
                truth = TRUTH if name == "computes" else shares(warm.probe, [1] * 4)
                found = dict.fromkeys(truth, 0.0) | shares(warm.probe, [1, 4, 8, 16])
                whole = sum(map(found.__getitem__, truth))
                points = 100 * max(abs(true - found[stage] / whole) for stage, true in truth.items())
                told = (f"{stage} {true:.2f} -> {found[stage] / whole:.2f}" for stage, true in truth.items())
                cells = {"job": name, "run": number + 1, "largest error, points": points, "shares": ", ".join(told)}
                yield Row(cells, points <= MOST_POINTS)
