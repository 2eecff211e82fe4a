"""How much memory does `compare()` take for sides over one dataset, and does one read what another has just read?

    python -m studies fidelity.sides [--sides 5] [--mib 800]
    python -m studies fidelity.sides --cold

Memory: a process of its own holds the dataset and compares. Told is the most that it and its descendants take (files in memory,
and PSS of the rest) beyond what they take of a dataset of 8 MiB, as a multiple of the dataset: 1 is one copy for all sides.

Cold: a sample waits 10 ms if no process has read it before; that of the slower side 5 ms more. Told is the ratio of sides
over one storage, and over one each, which is the true one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from autotune_loader import Comparison, compare
from autotune_loader.machine.processes import tree
from studies.processes import answer
from studies.study import Row, Table
from tests.support.bursts import ColdStore

MOST = 1.1
BAR = "all sides hold one dataset (1.1 times at most); over one storage the ratio is that over one each"
MIB, SMALL_MIB, WIDTH = 1 << 20, 8, 1 << 16
"""Bytes; a dataset that costs nothing; floats of a sample, 256 KiB."""
STORED, DECODE_S = 20_000, 0.005
"""Samples of a cold storage, and what each takes the slower side beyond."""


def peak_bytes(sides: int, mib: int) -> int:
    """The most that comparing so many sides takes, without the dataset's first copy."""
    data = TensorDataset(torch.rand(mib * MIB // 4 // WIDTH, WIDTH))
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.2):
            most = max(most, taken_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    loaders = {f"{workers} workers": DataLoader(data, 4, shuffle=True, num_workers=workers) for workers in range(sides)}
    compare(loaders, budget=10.0, progress=False)
    ended.set()
    looking.join()
    return most - mib * MIB


def compared(order: Callable[[ColdStore], dict[str, Any]], *, is_shared: bool) -> Comparison:
    """Two sides over a storage of which nothing was read, or over one each, in this order."""
    slow = ColdStore.new(STORED, DECODE_S)
    fast = ColdStore(slow.path) if is_shared else ColdStore.new(STORED)
    try:
        sides = {"slow": slow, "fast": fast}
        loaders = {name: DataLoader(data, 4, num_workers=2, **order(data)) for name, data in sides.items()}
        return compare(loaders, budget=20.0, progress=False)
    finally:
        for path in {slow.path, fast.path}:
            path.unlink()


class OwnSampler(SequentialSampler):
    """One that is not torch's."""


ORDERS: dict[str, Callable[[ColdStore], dict[str, Any]]] = {
    "shuffled": lambda data: {"shuffle": True},
    "in order": lambda data: {},
    "a sampler of the user's": lambda data: {"sampler": OwnSampler(data)},
}


def taken_bytes() -> int:
    """What this process and its descendants have in memory: files without a name as a whole, and PSS but for these."""
    total = 0
    for pid in tree(os.getpid()):
        with suppress(OSError):  # it has ended
            rows = (row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            sizes = {name[:-1]: 1024 * int(size) for name, size, _ in rows}
            total += sizes["Pss"] - sizes["Pss_Shmem"]
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):  # noqa: PTH115
                total += os.fstat(int(name)).st_blocks * 512
    return total


def rows(*, sides: int = 5, mib: int = 800, cold: bool = False, quick: bool = False) -> Table:
    for name, order in ORDERS.items() if cold else ():
        alone, together = (compared(order, is_shared=each).ratios["fast"] for each in (False, True))
        is_met = together.low <= alone.high and alone.low <= together.high
        yield Row({"order": name, "one storage each": alone, "one for both": together}, is_met)
    for count in () if cold else (2,) if quick else (2, sides):
        sizes = (SMALL_MIB, 64 if quick else mib)
        small, large = (int(answer(peak_bytes, sides=count, mib=each)) / MIB for each in sizes)
        times = (large - small) / (sizes[1] - sizes[0])
        cells = {
            "sides": count,
            f"MiB with {sizes[0]}": small,
            f"MiB with {sizes[1]}": large,
            "times the dataset": times,
        }
        yield Row(cells, None if quick else times <= MOST)
