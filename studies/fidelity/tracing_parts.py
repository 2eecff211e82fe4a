"""Microseconds that tracing adds to a batch, part by part, in one process and on one thread.

    python -m studies.fidelity.tracing_parts       # about 20 seconds

"loader" is what the dataset's and the collate function's wrappers add, "loop" what the burst's loop adds to `next` and the
step, its checks not included, "travel" what the record adds to pickling and unpickling a batch between processes. Blocks of
each kind take turns in random order. The best tenth shows the work itself, the median what the rest of the machine makes of it.
"""

from __future__ import annotations

import pickle
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from autotune_loader.config import LoaderConfig
from autotune_loader.probe.burst import make_traced_loader
from autotune_loader.probe.run import Run
from autotune_loader.probe.step import build_step
from autotune_loader.probe.traced import EndlessBatches
from autotune_loader.probe.workload import DataSide
from autotune_loader.trial import BurstPlan
from studies.fidelity.measure import workload_of
from studies.fidelity.tracing_cost import NoStep
from studies.workloads import WORKLOADS

BLOCK, BLOCKS = 100, 300


class Constant(Dataset[Any]):
    """The same sample each time."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        return 1.0


class ConstantBatches(Constant):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices


def unchanged(samples: list[Any]) -> list[Any]:
    return samples


def main() -> None:
    torch.set_num_threads(1)
    print("| | plain batch | loader | loop | together | loader, loop: median |\n|---|---|---|---|---|---|")
    cases = {
        "`TensorDataset`": (None, None),
        "constant samples": (Constant(), unchanged),
        "`__getitems__`": (ConstantBatches(), unchanged),
    }
    for name, (dataset, collate) in cases.items():
        print(_row(name, dataset, collate), flush=True)
    print(f"\ntravel {_travel_us():.2f} us")


def _row(name: str, dataset: Any, collate: Any) -> str:
    kinds = _kinds(dataset, collate)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for _ in range(BLOCKS):
        random.shuffle(order)
        for kind in order:
            deliver, begun = kinds[kind], time.perf_counter()
            for _ in range(BLOCK):
                deliver()
            seconds[kind].append((time.perf_counter() - begun) / BLOCK * 1e6)
    best = {kind: sorted(values)[BLOCKS // 10] for kind, values in seconds.items()}
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    together = best["traced"] - best["plain"]
    return (
        f"| {name} | {best['plain']:.1f} us | {best['unlooped'] - best['plain']:+.2f} us "
        f"| {best['traced'] - best['unlooped']:+.2f} us | {together:+.2f} us = {together / best['plain']:.2%} "
        f"| {middle['unlooped'] - middle['plain']:+.2f}, {middle['traced'] - middle['unlooped']:+.2f} us |"
    )


def _kinds(dataset: Any, collate: Any) -> dict[str, Callable[[], object]]:
    study = replace(WORKLOADS["in_memory"](), train_step=NoStep())
    workload = workload_of(study if dataset is None else replace(study, dataset=dataset))
    data: DataSide = replace(workload.data, collate_fn=collate)
    looped, unlooped = (iter(make_traced_loader(data, LoaderConfig(), 0)) for _ in range(2))
    assert data.batch_size is not None
    batches: Any = EndlessBatches(BatchSampler(data.sampler, data.batch_size, data.drop_last))
    bare = iter(DataLoader(data.dataset, batch_sampler=batches, collate_fn=collate))
    step = build_step(workload.training, next(bare))
    run = Run(BurstPlan(max_s=1e6, min_s=1e6, relative_error=0.0), 0, time.monotonic())
    return {
        "plain": lambda: step.run(next(bare)),
        "unlooped": lambda: step.run(next(unlooped)[0]),
        "traced": lambda: (run.deliver(looped, step), run.knows_enough()),
    }


def _travel_us() -> float:
    """The pickled record alone: the batch's tensors take the same road with and without it."""
    fetch = (1, time.monotonic(), time.monotonic(), time.monotonic(), 0.0123, 64)
    kinds = {"bare": (7, [1, 2]), "traced": (7, ([1, 2], fetch))}
    best = {}
    for name, thing in kinds.items():
        times = []
        for _ in range(200):
            begun = time.perf_counter()
            for _ in range(100):
                pickle.loads(ForkingPickler.dumps(thing))
            times.append((time.perf_counter() - begun) / 100 * 1e6)
        best[name] = sorted(times)[20]
    return best["traced"] - best["bare"]


if __name__ == "__main__":
    main()
