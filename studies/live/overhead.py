"""What does a step of AutoLoader without workers take more than DataLoader's? Rows that lie in memory, in batches of 16.

    python -m studies.live.overhead                        # about a minute
    python -m studies.live.overhead --pairs 200 --settle 20

Both loaders are iterated in one process, in turns of some hundred batches, whose order changes. Before that AutoLoader has
some seconds to decide; a row with workers is another question. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune_loader import AutoLoader
from autotune_loader.machine.facts import cpu_model
from autotune_loader.machine.limits import usable_cores
from studies.workloads import Items

ROWS, SIZE = 1 << 20, 16
STEP_S = 0.0002
"""Of the training in each step, so that workers would not make it faster."""


def datasets() -> dict[str, Dataset[Any]]:
    rows, labels = torch.rand(ROWS, 8), torch.arange(ROWS) % 10
    return {
        "rows of a dataset of one's own": Items(lambda index: (rows[index], labels[index]), ROWS),
        "TensorDataset": TensorDataset(rows, labels),
    }


def endless(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def seconds_of(batches: Iterator[Any], count: int) -> float:
    """Of so many steps."""
    begun = time.perf_counter()
    for _ in itertools.islice(batches, count):
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            pass
    return time.perf_counter() - begun


def row(name: str, data: Dataset[Any], pairs: int, block: int, settle_s: float) -> str:
    """Of the table: microseconds a batch, the step left out."""
    loader = AutoLoader(data, batch_size=SIZE)
    sides = {"plain": endless(DataLoader(data, batch_size=SIZE)), "auto": endless(loader)}
    until = time.perf_counter() + settle_s
    while time.perf_counter() < until:
        seconds_of(sides["auto"], block)
    seconds_of(sides["plain"], block)
    found = dict[str, list[float]](plain=[], auto=[])
    for number in range(pairs):
        for side in sorted(sides, reverse=bool(number % 2)):
            found[side].append((seconds_of(sides[side], block) / block - STEP_S) * 1e6)
    more = [auto - plain for auto, plain in zip(found["auto"], found["plain"], strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    took = " | ".join(f"{statistics.median(each):.1f}" for each in found.values())
    return f"| {name} | {took} | {middle:+.1f} ({low:+.1f} to {high:+.1f}) | {loader.num_workers} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="turns of each loader")
    parser.add_argument("--block", type=int, default=500, help="batches of a turn")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{usable_cores().usable} cores of {cpu_model()}, load {os.getloadavg()[0]:.1f}; {versions}\n")
    print("| samples | DataLoader, us a batch | AutoLoader | more, median of pairs (quartiles) | workers |")
    print(f"|{'---|' * 5}")
    for name, data in datasets().items():
        print(row(name, data, options.pairs, options.block, options.settle), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
