"""Does AutoLoader transfer a batch faster than DataLoader with as many workers? Interleaved; the loop reads each batch.

    python -m studies live.transfer                    # about seven minutes
    python -m studies live.transfer --rounds 9 --only images
    python -m studies live.transfer --quick            # a minute: is "3 times as fast where transfer counts" broken?

With `--quick` a kind counts where fetching allows 3 times as many, and a promise is broken only where the upper end of the
paired interval is below it, in two looks, and then the exit status is 1; and only while the cores are free. "Could not tell"
is no failure: noise, or a busy machine, turns nothing red.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.values import Interval
from studies.pictures import normalised
from studies.processes import cores_free
from studies.study import Row, Table
from studies.verdict import TRANSFER, Verdict, confirmed, fast_enough, ratio
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


PROMISED, QUICK_S, QUICK_ROUNDS, LOOK_S = ("tiny", "images (19 MB)", "flat, 16 MiB", "300 tensors"), 0.6, 5, 20.0
"""Where transfer counts; how long and how often each is looked at with `--quick`, and after what no further round begins."""
BAR = "medians, in the column `bar`; with --quick: broken where it is surely less than 3 times DataLoader"


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


def rates_of(
    kind: Kind, rounds: int, seconds: float, sides: tuple[str, ...], limit_s: float = math.inf
) -> dict[str, list[float]]:
    """Batches/s of each side, which take turns; every second round runs backwards, none begins after the limit."""
    begun = time.monotonic()
    data, rates = Items(kind.get, 10_000_000), {side: list[float]() for side in sides}
    for number in range(rounds):
        for side in () if time.monotonic() > begun + limit_s else sides if number % 2 else sides[::-1]:
            make = AutoLoader if side == "ours" else DataLoader
            own = {"tune": False, **kind.ours} if side == "ours" else {}
            workers = 0 if side == "none" else kind.workers
            rates[side].append(rate(make(data, batch_size=kind.size, num_workers=workers, **kind.both, **own), seconds))
    return rates


def row(name: str, kind: Kind, rounds: int, seconds: float) -> Row:
    none, plain, ours = rates_of(kind, rounds, seconds, ("none", "plain", "ours")).values()
    times = [one / other for one, other in zip(ours, plain, strict=True)]
    of_faster = [own / max(others) for own, *others in zip(ours, none, plain, strict=True)]
    cells = {"batches of": name, "workers": kind.workers, "DataLoader, 0 workers, /s": statistics.median(none)}
    cells |= {"DataLoader, /s": statistics.median(plain), "AutoLoader, /s": statistics.median(ours)}
    cells |= {"AutoLoader / DataLoader": times, "AutoLoader / the faster DataLoader": of_faster, "bar": kind.bar}
    return Row(cells, statistics.median(times) >= kind.bar)


def quick_row(name: str, kind: Kind) -> Row:
    most = math.inf

    def look() -> tuple[Interval, Verdict]:
        nonlocal most
        none, plain, ours = rates_of(kind, QUICK_ROUNDS, QUICK_S, ("none", "plain", "ours"), LOOK_S).values()
        found = ratio(ours, plain)
        # Workers deliver no more than they fetch: where that is less than 3 times, transfer is not what counts.
        most = min(kind.workers, inspect_machine().usable_cores) * statistics.median(none) / statistics.median(plain)
        return found, fast_enough(found) if most >= TRANSFER else Verdict.UNKNOWN

    found, verdict, free = confirmed(look, cores_free)
    cells = {"batches of": name, "AutoLoader / DataLoader": found, "fetching allows": most}
    return Row({**cells, "cores free": f"{free:.0%}", "3 times": verdict.value}, verdict.is_met)


def rows(*, only: str = "", rounds: int = 5, seconds: float = 1.5, quick: bool = False) -> Table:
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    for name, kind in KINDS.items():
        if only in name and (not quick or name in PROMISED):
            yield quick_row(name, kind) if quick else row(name, kind, rounds, seconds)
