"""Is a batch handed over faster than by DataLoader with as many workers? In turns, in one process.

python -m studies.live.handing_over                    # about three minutes
python -m studies.live.handing_over --rounds 9 --only small
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from studies.workloads import Items


def waiting(index: int) -> Any:
    time.sleep(0.002)
    return torch.full((64,), float(index)), index


KINDS: dict[str, tuple[Callable[[int], Any], int, int, float]] = {
    # what a sample is, batch size, workers, goal
    "small tensors": (lambda i: (torch.full((64,), float(i)), i), 64, 2, 3.0),
    "large tensors (19 MB)": (lambda i: (torch.full((150_000,), float(i)), i), 32, 2, 1.0),
    "waiting for samples": (waiting, 16, 8, 1.0),
    "dicts and nested tuples": (lambda i: {"x": torch.full((64,), float(i)), "y": (i, (i, float(i)))}, 64, 2, 1.0),
    "numpy arrays": (lambda i: np.full(64, i), 64, 2, 1.0),
    "strings": (lambda i: (f"sample {i}", i), 64, 2, 1.0),
    "300 tensors": (lambda i: {f"x{n}": i for n in range(300)}, 4, 2, 1.0),
}


def rate(loader: Any, seconds: float, warm: int = 20) -> float:
    """Batches/s after the first ones."""
    batches, begun = iter(loader), 0.0
    for count, _ in enumerate(batches):
        if count == warm:
            begun = time.perf_counter()
        if begun and time.perf_counter() - begun > seconds:
            return (count - warm) / (time.perf_counter() - begun)
    raise ValueError("the data ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="a word of a row's name")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    print("| batches of | workers | DataLoader, batches/s | AutoLoader, times as fast: median (least to most) | goal |")
    print("|---|---|---|---|---|")
    for name, (get, size, workers, goal) in KINDS.items():
        if options.only not in name:
            continue
        plain, ratios, data = list[float](), list[float](), Items(get, 10_000_000)
        for _ in range(options.rounds):
            asked = {"batch_size": size, "num_workers": workers}
            plain.append(rate(DataLoader(data, **asked), options.seconds))
            ratios.append(rate(AutoLoader(data, tune=False, **asked), options.seconds) / plain[-1])
        middle = statistics.median(ratios)
        told = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {workers} | {statistics.median(plain):.0f} | {told} | {goal:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
