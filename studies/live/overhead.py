"""What does a step of AutoLoader without workers take more than DataLoader's? Rows that lie in memory, in batches of 16.

    python -m studies live.overhead                        # about a minute
    python -m studies live.overhead --pairs 200 --settle 20

Both loaders are iterated in one process, in turns of some hundred batches, whose order changes. Before that AutoLoader has
some seconds to decide; a row with workers is another question. Run it on a quiet machine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune_loader import AutoLoader
from studies.study import Row, Table
from studies.workloads import Items

ROWS, SIZE = 1 << 20, 16
STEP_S = 0.0002
"""Of the training in each step, so that workers would not make it faster."""
MOST_US = 5.0
BAR = "at most 5 us more than DataLoader"


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


def row(name: str, data: Dataset[Any], pairs: int, block: int, settle_s: float) -> Row:
    """Microseconds a batch, the step left out."""
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
    plain, auto = (statistics.median(each) for each in found.values())
    cells = {"samples": name, "DataLoader, us a batch": plain, "AutoLoader": auto}
    cells["more, median of pairs (quartiles)"] = f"{middle:+.1f} ({low:+.1f} to {high:+.1f}, n = {pairs})"
    return Row({**cells, "workers": loader.num_workers}, middle <= MOST_US)


def rows(*, only: str = "", pairs: int = 60, block: int = 500, settle: float = 8.0) -> Table:
    """`pairs`: turns of each loader, of so many batches (`block`); `settle`: seconds before."""
    torch.set_num_threads(1)
    for name, data in datasets().items():
        if only in name:
            yield row(name, data, pairs, block, settle)
