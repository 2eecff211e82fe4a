"""Are batches in order as fast as batches out of order, where some samples are late? Each run is a process of its own.

    python -m studies live.late --only tails                # about six minutes a round; --step: with steps, too
    python -m studies live.late --only stuck                # one read of 20 s

AutoLoader keeps its workers, as its tuner is never due, but their number might change. What is compared takes turns; ratios
are of one round.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from studies.processes import answer
from studies.study import Row, Table

USUAL_S, WORKERS = 0.002, 8
JOBS: dict[str, Callable[[int, random.Random], float]] = {
    "1 of 32 waits 200 ms": lambda index, rng: 0.2 if index % 32 == 20 else USUAL_S,
    "1 in 10 waits ten times": lambda index, rng: USUAL_S * (10 if rng.random() < 0.1 else 1),
    "Pareto 1.5": lambda index, rng: min(1.0, USUAL_S * 0.5 ** (1 / 1.5) * rng.paretovariate(1.5)),  # a median of 2 ms
    "uniform": lambda index, rng: USUAL_S,
}
BARS = {1: 0.77, 8: 0.95, 32: 0.95}
"""Of the rate of in_order=False, by the samples of a batch."""
LONGEST_S = 1.0
"""What one stuck read may keep the loop."""
BAR = "tails: that share of in_order=False; stuck: the loop waits at most 1 s, nothing is left; the same batches"
Found = list[dict[str, Any]]
"""What the processes of one kind of run find, by round."""


class Waits:
    """Samples that are waited for, with random numbers; where there is no flag yet, the first read of one is stuck."""

    def __init__(self, job: str, count: int, scale: float = 1.0, stuck_s: float = 0.0, flag: str = "") -> None:
        self.stuck_s, self.flag, rng = stuck_s, flag, random.Random(0)
        self.waits_s = [scale * JOBS[job](index, rng) for index in range(count)]

    def __len__(self) -> int:
        return len(self.waits_s)

    def __getitem__(self, index: int) -> Any:
        if self.stuck_s and index == len(self) // 3:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
                time.sleep(self.stuck_s)
        time.sleep(self.waits_s[index])
        return torch.tensor([index, index * index]), torch.tensor([random.random(), float(torch.rand(()))])


def measured(
    job: str, size: int, batches: int, how: str = "auto", scale: float = 1.0, step_s: float = 0.0, stuck_s: float = 0.0
) -> dict[str, Any]:
    """One run, in a process of its own; `how` is in_order, any_order or auto. The first batch is not counted."""
    from autotune_loader import AutoLoader

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digests, ends, longest_s, most, asked = (hashlib.sha256(), hashlib.sha256()), list[float](), 0.0, 0, math.inf
    with tempfile.TemporaryDirectory() as folder:
        data: Any = Waits(job, size * batches, scale, stuck_s, f"{folder}/flag")
        given: dict[str, Any] = {"batch_size": size, "num_workers": WORKERS, "prefetch_factor": 2}
        if how == "auto":
            loader: Any = AutoLoader(data, max_workers=WORKERS, **given)
            loader._known().tuner.wake = math.inf
        else:
            loader = DataLoader(data, in_order=how == "in_order", **given)
        begun, iterator = time.monotonic(), iter(loader)
        for batch in iterator:
            ends.append(time.monotonic())
            longest_s = max(longest_s, ends[-1] - asked)
            most = max(most, getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0))
            for digest, each in zip(digests, batch, strict=True):
                digest.update(each.numpy().tobytes())
            time.sleep(step_s)
            asked = time.monotonic()
        if len(ends) != batches or loader.num_workers != WORKERS:
            raise RuntimeError(f"{len(ends)} batches and {loader.num_workers} workers at the end")
        del iterator, batch, loader
        end_s = time.monotonic() - asked
        time.sleep(0.2)
    return {
        "rate": (len(ends) - 1) / (ends[-1] - ends[0]), "most": most, "left": left(), "longest_s": longest_s,
        "whole_s": asked - begun, "end_s": end_s, "values": digests[0].hexdigest(), "draws": digests[1].hexdigest(),
    }  # fmt: skip


def left() -> int:
    """Processes of this one's session that still run: what it has started, directly or not."""
    found = -1
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            found += os.getsid(each.pid) == os.getsid(0) and each.status() != psutil.STATUS_ZOMBIE
    return found


def in_turns(run: dict[str, Any], rounds: int, *hows: str) -> list[Found]:
    """What each finds in each round, in an order of each round's own."""
    found = [Found() for _ in hows]
    for number in range(rounds):
        for its, how in random.Random(number).sample(list(zip(found, hows, strict=True)), len(hows)):
            its.append(answer(measured, how=how, **run))
    return found


def column(found: Found, key: str, over: Found | None = None) -> list[Any]:
    """A figure, or its ratios."""
    return [each[key] / its[key] if over else each[key] for each, its in zip(found, over or found, strict=True)]


def tails(rounds: int, seconds: float, scale: float, step: bool, quick: bool) -> Table:
    jobs, sizes = (list(JOBS)[:2], [8]) if quick else (list(JOBS)[:3], list(BARS))
    for is_stepped, job, size in itertools.product((False, True) if step else (False,), jobs, sizes):
        batch_s = fmean(Waits(job, 1 << 15).waits_s) * size / WORKERS
        batches, step_s = round(seconds / batch_s), scale * batch_s * is_stepped
        run = {"job": job, "size": size, "batches": batches, "scale": scale, "step_s": step_s}
        plain, free, ours = in_turns(run, rounds, "in_order", "any_order", "auto")
        is_same = len({*column(plain + ours, "values")}) == len({*column(ours, "draws")}) == 1
        cells = {"job": job, "samples": size, "batches": batches, "step, ms": 1000 * step_s}
        for name, found in (("in order, /s", plain), ("in_order=False, /s", free), ("AutoLoader, /s", ours)):
            cells[name] = column(found, "rate")
        of_free = column(ours, "rate", free)
        cells |= {"of in order": column(ours, "rate", plain), "of in_order=False": of_free, "bar": BARS[size]}
        cells |= {"most ahead": max(column(ours, "most")), "same batches": is_same}
        yield Row(cells, is_same and median(of_free) >= BARS[size])


def stuck(rounds: int, scale: float, quick: bool) -> Table:
    stuck_s, batches = (3.0, 400) if quick else (20.0, 2000)
    run = {"job": "uniform", "size": 8, "batches": batches, "scale": scale, "stuck_s": stuck_s}
    plain, ours = in_turns(run, rounds, "in_order", "auto")
    is_same = len({*column(plain + ours, "values")}) == 1
    is_met = is_same and max(column(ours, "longest_s")) <= LONGEST_S and not any(column(ours, "left"))
    for name, found, verdict in (("DataLoader", plain, None), ("AutoLoader", ours, is_met)):
        cells = {f"one read of {stuck_s:.0f} s": name, "longest wait, s": column(found, "longest_s")}
        cells |= {"whole, s": column(found, "whole_s"), "its end, s": column(found, "end_s")}
        yield Row({**cells, "processes left": max(column(found, "left")), "same batches": is_same}, verdict)


def rows(
    *,
    only: str = "",
    rounds: int = 3,
    seconds: float = 4.5,
    scale: float = 1.0,
    step: bool = False,
    quick: bool = False,
) -> Table:
    """`scale` is of all waits, so that neighbours matter less; `step` adds rows whose loop needs as long as 8 workers."""
    rounds, seconds = (1, 0.5) if quick else (rounds, seconds)
    tables = {"tails": (tails, (rounds, seconds, scale, step, quick)), "stuck": (stuck, (rounds, scale, quick))}
    for name, (table, given) in tables.items():
        for row in table(*given) if only in name else ():
            yield row._replace(is_met=None) if quick and isinstance(row, Row) else row
