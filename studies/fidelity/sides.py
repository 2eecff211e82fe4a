"""How much memory does `compare()` take for sides over one dataset?

    python -m studies.fidelity.sides [--sides 5] [--mib 800]

A process of its own holds the dataset and compares. Told is the most that it and its descendants take (files in memory, and
PSS of the rest) beyond what they take of a dataset of 8 MiB, as a multiple of the dataset: 1 is one copy for all sides.
"""

from __future__ import annotations

import argparse
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import compare
from autotune_loader.machine.processes import tree
from studies.processes import last_line

MIB, SMALL_MIB, WIDTH = 1 << 20, 8, 1 << 16
"""Bytes; a dataset that costs nothing; floats of a sample, 256 KiB."""


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sides", type=int, default=5)
    parser.add_argument("--mib", type=int, default=800)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(peak_bytes(asked.one, asked.mib), flush=True)
        return
    for sides in (2, asked.sides):
        small, large = (
            int(last_line("-m", "studies.fidelity.sides", "--one", str(sides), "--mib", str(mib))) / MIB
            for mib in (SMALL_MIB, asked.mib)
        )
        times = (large - small) / (asked.mib - SMALL_MIB)
        print(
            f"{sides} sides: {small:,.0f} MiB with {SMALL_MIB}, {large:,.0f} MiB with {asked.mib}: {times:.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
