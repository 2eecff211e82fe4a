"""Does AutoLoader transfer a batch faster than DataLoader with as many workers? Interleaved; the loop reads each batch.

python -m studies.live.transfer                    # about seven minutes
python -m studies.live.transfer --rounds 9 --only images
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from studies.pictures import normalised
from studies.workloads import Items

RAW = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)
FLAT = torch.rand(1 << 20)


def image(index: int) -> Any:
    return normalised(RAW[16:240, 16:240]), index % 10


def flat(mebibytes: float) -> Callable[[int], Any]:
    source = FLAT[: int(mebibytes * 2**18)].clone()
    return lambda index: (source + index, index % 10)


def nested(index: int) -> Any:
    mask, more = torch.ones(128, dtype=torch.bool), (torch.zeros(4), torch.tensor(index))
    return {"ids": torch.arange(128) + index, "mask": mask, "more": more, "name": str(index)}


def waiting(seconds: float) -> Callable[[int], Any]:
    return lambda index: time.sleep(seconds) or (torch.full((16,), float(index)), index)


def as_it_is(batch: Any) -> Any:
    return batch


class Kind(NamedTuple):
    """What a sample is, how many a batch has, workers, the bar, arguments of both loaders and of AutoLoader alone."""

    get: Callable[[int], Any]
    size: int
    workers: int
    bar: float
    both: Mapping[str, Any] = {}
    ours: Mapping[str, Any] = {}


KINDS = {
    "tiny": Kind(lambda i: (torch.full((16,), float(i)), i % 10), 32, 2, 6.0),
    "images (19 MB)": Kind(image, 32, 2, 3.0),
    "flat, 16 MiB": Kind(flat(0.5), 32, 2, 3.5),
    "flat, 128 MiB": Kind(flat(4), 32, 2, 1.5),
    "flat, 320 KiB": Kind(flat(0.01), 32, 2, 5.0),
    "dicts and tuples": Kind(nested, 32, 2, 4.5),
    "strings": Kind(lambda i: (f"a sentence of some words {i}", i), 64, 2, 4.5),
    "300 tensors": Kind(lambda i: [torch.full((8,), float(i)) for _ in range(300)], 8, 2, 10.0),
    "numpy arrays": Kind(lambda i: np.full((64, 64), i, np.float32), 32, 2, 2.5, both={"collate_fn": as_it_is}),
    "samples that wait 2 ms": Kind(waiting(0.002), 16, 8, 1.0),
    "samples that wait 5 ms, fetch_threads=16": Kind(waiting(0.005), 32, 2, 8.0, ours={"fetch_threads": 16}),
}


def read(batch: Any) -> None:
    if isinstance(batch, torch.Tensor):
        batch.sum()
    elif isinstance(batch, (list, tuple, dict)):
        for each in batch.values() if isinstance(batch, dict) else batch:
            read(each)


def rate(loader: Any, seconds: float) -> float:
    """Batches/s after the first third of that time."""
    batches, begun, first, count = iter(loader), time.perf_counter(), 0.0, 0
    for batch in batches:
        read(batch)
        now = time.perf_counter()
        if first:
            count += 1
            if now - first > seconds:
                break
        elif now - begun > seconds / 3:
            first = now
    return count / (time.perf_counter() - first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--only", default="", help="a word of a row's name")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    print("| batches of | workers | DataLoader, 0 workers | DataLoader | AutoLoader | ratio, median (range) | bar |")
    print("|---|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        if options.only not in name:
            continue
        data, rates = Items(kind.get, 10_000_000), {which: list[float]() for which in ("none", "plain", "ours")}
        for number in range(options.rounds):
            for which in list(rates) if number % 2 else list(rates)[::-1]:
                make = AutoLoader if which == "ours" else DataLoader
                own = {"tune": False, **kind.ours} if which == "ours" else {}
                workers = 0 if which == "none" else kind.workers
                loader = make(data, batch_size=kind.size, num_workers=workers, **kind.both, **own)
                rates[which].append(rate(loader, options.seconds))
        ratios = [ours / plain for ours, plain in zip(rates["ours"], rates["plain"], strict=True)]
        none, plain, ours = (f"{statistics.median(each):,.0f}/s" for each in rates.values())
        told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {kind.workers} | {none} | {plain} | {ours} | {told} | {kind.bar:g} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
