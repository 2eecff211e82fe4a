"""What does tracing take from the rate? The goal is at most 1 %.

    python -m studies.fidelity.tracing_cost

Pairs of a traced and a plain loader over the same batches, in random order, each with a fresh iterator: the plain loop
calls `next`, the traced loop is the one that bursts run, its checks included; neither has a step, so every cost shows.
Timed from the end of the first round of workers to the last batch. Reported is the mean log-ratio with its t interval.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from autotune_loader.config import LoaderConfig
from autotune_loader.probe.burst import make_traced_loader
from autotune_loader.probe.run import Run
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.probe.traced import EndlessBatches
from autotune_loader.probe.workload import DataSide
from autotune_loader.stats import mean_interval
from autotune_loader.trial import BurstPlan
from studies.fidelity.measure import workload_of
from studies.fidelity.records import RESULTS, append
from studies.quiet import QuietTurns
from studies.workloads import WORKLOADS, SpinDataset

RAW = RESULTS / "tracing_cost.jsonl"
CASES = (
    # workload, workers, batches a run, batches that are left out at the start
    ("cpu_10ms", 0, 60, 1),
    ("cpu_10ms", 2, 120, 4),
    ("in_memory", 0, 1500, 50),
    ("in_memory", 2, 800, 100),
)
PAIRS = 24


class NoStep:
    """Nothing: a step on several threads varies by more than tracing costs."""

    def __call__(self, model: Any, batch: Any) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.tracing_cost")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    chosen = parser.parse_args()
    quiet, order = QuietTurns(chosen.lock), random.Random(0)
    cases = [(*case, *_parts(case[0])) for case in CASES]
    logs: dict[tuple[str, int], list[float]] = {(name, workers): [] for name, workers, *_ in cases}
    extra_us: dict[tuple[str, int], list[float]] = {(name, workers): [] for name, workers, *_ in cases}
    with quiet.turns():
        for number in range(chosen.pairs):
            for name, workers, count, skip, data, step in order.sample(cases, len(cases)):
                config = LoaderConfig(num_workers=workers, prefetch_factor=2 if workers else None)
                seconds = {
                    run.__name__: run(data, step, config, number, count, skip)
                    for run in order.sample([plain, traced], 2)
                }
                logs[name, workers].append(math.log(seconds["traced"] / seconds["plain"]))
                extra_us[name, workers].append((seconds["traced"] - seconds["plain"]) / count * 1e6)
                append(RAW, {"workload": name, "workers": workers, "pair": number, "batches": count, **seconds})
                quiet.next()
    print("| | workers | pairs | cost | 95 % interval | median per batch |\n|---|---|---|---|---|---|")
    for (name, workers), values in logs.items():
        cost, extra = mean_interval(values), statistics.median(extra_us[name, workers])
        print(
            f"| `{name}` | {workers} | {cost.count} | {cost.value:+.2%} | {cost.low:+.2%} to {cost.high:+.2%} "
            f"| {extra:+.1f} us |"
        )


def _parts(name: str) -> tuple[DataSide, TrainingStep]:
    if name == "cpu_10ms":
        study = replace(WORKLOADS["cpu_bound"](), dataset=SpinDataset(4096, rounds=20), train_step=NoStep())
    else:
        study = replace(WORKLOADS[name](), train_step=NoStep())
    workload = workload_of(study)
    loader = make_traced_loader(workload.data, LoaderConfig(), seed=0)
    batch, _ = next(iter(loader))
    return workload.data, build_step(workload.training, batch)


def plain(data: DataSide, step: TrainingStep, config: LoaderConfig, seed: int, count: int, skip: int) -> float:
    """Seconds of a loop without any tracing, over the batches that `traced` sees with this seed."""
    import torch

    torch.manual_seed(seed)
    assert data.batch_size is not None
    batches: Any = EndlessBatches(BatchSampler(data.sampler, data.batch_size, data.drop_last))
    loader = DataLoader(data.dataset, batch_sampler=batches, **config.to_kwargs())
    iterator = iter(loader)

    def deliver() -> None:
        step.run(next(iterator))

    return _timed(deliver, count, skip)


def traced(data: DataSide, step: TrainingStep, config: LoaderConfig, seed: int, count: int, skip: int) -> float:
    """Seconds of the loop that bursts run."""
    iterator = iter(make_traced_loader(data, config, seed))
    plan = BurstPlan(max_s=1e6, min_s=0.1, relative_error=0.0)
    run = Run(plan, config.num_workers, time.monotonic())

    def deliver() -> None:
        run.deliver(iterator, step)
        run.knows_enough()

    return _timed(deliver, count, skip)


def _timed(deliver: Callable[[], None], count: int, skip: int) -> float:
    for _ in range(skip):
        deliver()
    begun = time.perf_counter()
    for _ in range(count):
        deliver()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
