"""Are batches in order as fast as batches out of order, where some samples are late? Each run is a process of its own.

    python -m studies.live.late --only tails                # about six minutes a round; --step: with steps, too
    python -m studies.live.late --only stuck                # one read of 20 s
    python -m studies.live.late --only uniform --before ../earlier   # no sample is late: beside another worktree
    python -m studies.live.late --small                     # under a minute; shows that the study works, and ends with 0

AutoLoader keeps its workers, as its tuner is never due, but their number might change. What is compared takes turns; ratios
are of one round. Cells: the median of the rounds (least..most). Where a bar is missed a row ends with **no**, the study with 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from studies.processes import ROOT, last_line

USUAL_S, WORKERS = 0.002, 8
JOBS: dict[str, Callable[[int, random.Random], float]] = {
    "1 of 32 waits 200 ms": lambda index, rng: 0.2 if index % 32 == 20 else USUAL_S,
    "1 in 10 waits ten times": lambda index, rng: USUAL_S * (10 if rng.random() < 0.1 else 1),
    "Pareto 1.5": lambda index, rng: min(1.0, USUAL_S * 0.5 ** (1 / 1.5) * rng.paretovariate(1.5)),  # a median of 2 ms
    "uniform": lambda index, rng: USUAL_S,
}
BARS = {1: 0.77, 8: 0.95, 32: 0.95}
"""Of the rate of in_order=False, by the samples of a batch."""
LONGEST_S, AS_BEFORE = 1.0, 0.99
"""What one stuck read may keep the loop; CPU and wall of the other worktree over these."""
Found = list[dict[str, Any]]
"""What the processes of one kind of run find, by round."""


def run_of(job: str, size: int, batches: int, **other: Any) -> Namespace:
    """What a process measures: `impl` is in_order, any_order or auto; one read takes `stuck_s`."""
    usual = {"impl": "auto", "workers": WORKERS, "scale": 1.0, "step_s": 0.0, "stuck_s": 0.0, "tree": str(ROOT)}
    return Namespace(**{**usual, **other}, job=job, size=size, batches=batches)


class Waits:
    """Samples that are waited for, with random numbers; where there is no flag yet, the first read of one is stuck."""

    def __init__(self, run: Namespace, flag: str = "") -> None:
        self.stuck_s, self.flag, rng = run.stuck_s, flag, random.Random(0)
        self.waits_s = [run.scale * JOBS[run.job](index, rng) for index in range(run.size * run.batches)]

    def __len__(self) -> int:
        return len(self.waits_s)

    def __getitem__(self, index: int) -> Any:
        if self.stuck_s and index == len(self) // 3:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
                time.sleep(self.stuck_s)
        time.sleep(self.waits_s[index])
        return torch.tensor([index, index * index]), torch.tensor([random.random(), float(torch.rand(()))])


class Ready(list[int]):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices  # they cost nothing


def loader_of(run: Namespace, flag: str) -> Any:
    how: dict[str, Any] = {"batch_size": run.size, "num_workers": run.workers, "prefetch_factor": 2}
    data: Any = Ready(range(run.size * run.batches)) if run.job == "tiny" else Waits(run, flag)
    how |= {"collate_fn": min} if run.job == "tiny" else {}
    if run.impl != "auto":
        return DataLoader(data, in_order=run.impl == "in_order", **how)
    import autotune_loader

    if not Path(autotune_loader.__file__).is_relative_to(run.tree):
        raise RuntimeError(f"{autotune_loader.__file__} is not of {run.tree}")
    loader: Any = autotune_loader.AutoLoader(data, max_workers=run.workers, **how)
    loader._known().tuner.wake = math.inf
    return loader


def measured(run: Namespace, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digests, ends, longest_s, most = (hashlib.sha256(), hashlib.sha256()), list[float](), 0.0, 0
    loader, begun, used_s = loader_of(run, f"{folder}/read"), time.monotonic(), sum(os.times()[:4])
    batches, asked = iter(loader), math.inf  # the first batch is not counted
    for batch in batches:
        ends.append(time.monotonic())
        longest_s = max(longest_s, ends[-1] - asked)
        most = max(most, getattr(batches, "_send_idx", 0) - getattr(batches, "_rcvd_idx", 0))
        for digest, each in zip(digests, (() if run.job == "tiny" else batch), strict=False):
            digest.update(each.numpy().tobytes())
        if run.step_s:
            time.sleep(run.step_s)
        asked = time.monotonic()
    if loader.num_workers != run.workers or len(ends) != run.batches:
        raise RuntimeError(f"{loader.num_workers} workers and {len(ends)} batches at the end")
    del batches, loader, batch
    end_s, batch_s = time.monotonic() - asked, (ends[-1] - ends[0]) / (len(ends) - 1)
    cpu_us = (sum(os.times()[:4]) - used_s) / len(ends) * 1e6
    time.sleep(0.2)
    return {
        "rate": 1 / batch_s, "wall_us": batch_s * 1e6, "cpu_us": cpu_us, "most": most, "left": left(),
        "longest_s": longest_s, "whole_s": asked - begun, "end_s": end_s,
        "values": digests[0].hexdigest(), "draws": digests[1].hexdigest(),
    }  # fmt: skip


def left() -> int:
    """Processes of this one's session that still run: what it has started, directly or not."""
    found = -1
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            found += os.getsid(each.pid) == os.getsid(0) and each.status() != psutil.STATUS_ZOMBIE
    return found


def in_turns(run: Namespace, rounds: int, field: str, *values: str) -> list[Found]:
    """What each value of a field finds in each round, in an order of each round's own."""
    runs, found = [{**vars(run), field: value} for value in values], [Found() for _ in values]
    for number in range(rounds):
        for its, each in random.Random(number).sample(list(zip(found, runs, strict=True)), len(runs)):
            path = f"{each['tree']}{os.pathsep}{ROOT}"
            its.append(json.loads(last_line(__file__, "--job", json.dumps(each), PYTHONPATH=path)))
    return found


def column(found: Found, key: str, over: Found | None = None) -> list[Any]:
    """A figure, or its ratios."""
    return [each[key] / its[key] if over else each[key] for each, its in zip(found, over or found, strict=True)]


def told(values: list[float], form: str = ".3f") -> str:
    return f"{median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def tails(options: Namespace) -> Iterator[list[Any]]:
    names = ["in order, /s", "in_order=False, /s", "AutoLoader, /s", "of in order", "of in_order=False", "bar"]
    yield ["job", "samples", "batches", "step, ms", *names, "most ahead", "same batches", "within the bar"]
    steps, jobs = ((False, True) if options.step else (False,)), list(JOBS)[: 2 if options.small else 3]
    for is_stepped, job, size in itertools.product(steps, jobs, [8] if options.small else BARS):
        batch_s = fmean(Waits(run_of(job, 1, 1 << 15)).waits_s) * size / WORKERS
        batches, step_s = round(options.seconds / batch_s), options.scale * batch_s * is_stepped
        run = run_of(job, size, batches, scale=options.scale, step_s=step_s)
        found = plain, free, ours = in_turns(run, options.rounds or 3, "impl", "in_order", "any_order", "auto")
        is_same = len({*column(plain + ours, "values")}) == len({*column(ours, "draws")}) == 1
        of_free, rates = column(ours, "rate", free), [told(column(each, "rate"), ".0f") for each in found]
        cells = [*rates, told(column(ours, "rate", plain)), told(of_free), BARS[size], max(column(ours, "most"))]
        is_met = is_same and median(of_free) >= BARS[size]
        yield [job, size, batches, f"{1000 * step_s:.2f}", *cells, is_same, is_met]


def stuck(options: Namespace) -> Iterator[list[Any]]:
    stuck_s, batches = (3.0, 400) if options.small else (20.0, 2000)
    names = ["longest wait, s", "whole, s", "its end, s", "processes left", "same batches"]
    yield [f"one read of {stuck_s:.0f} s", *names, "within the bar"]
    run = run_of("uniform", 8, batches, scale=options.scale, stuck_s=stuck_s)
    plain, ours = in_turns(run, options.rounds or 3, "impl", "in_order", "auto")
    is_same = len({*column(plain + ours, "values")}) == 1
    is_met = is_same and max(column(ours, "longest_s")) <= LONGEST_S and not any(column(ours, "left"))
    for name, found, verdict in (("DataLoader", plain, ""), ("AutoLoader", ours, is_met)):
        seconds = [told(column(found, key), ".2f") for key in ("longest_s", "whole_s", "end_s")]
        yield [name, *seconds, max(column(found, "left")), is_same, verdict]


def uniform(options: Namespace) -> Iterator[list[Any]]:
    names = [f"{which}: {what}" for which in ("CPU", "wall") for what in ("before, us", "now, us", "before / now")]
    yield ["batches", "workers", *names, "within the bar"]
    for job, workers in itertools.product(("uniform", "tiny"), (2, WORKERS)):
        batches, rounds = (50_000, 12) if job == "tiny" else (500 * workers, 5)
        run = run_of(job, 8, batches // (20 if options.small else 1), workers=workers, scale=options.scale)
        before, now = in_turns(run, options.rounds or rounds, "tree", str(options.before), str(ROOT))
        cells, is_met = list[str](), True
        for key in ("cpu_us", "wall_us"):
            cells += [told(column(each, key), ".0f") for each in (before, now)] + [told(column(before, key, now))]
            is_met &= median(column(before, key, now)) >= AS_BEFORE
        yield [job, workers, *cells, is_met]


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tails", "stuck", "uniform"))
    parser.add_argument("--rounds", type=int, help="3; of uniform 5, of tiny batches 12")
    parser.add_argument("--scale", type=float, default=1.0, help="of all waits, so that neighbours matter less")
    parser.add_argument("--seconds", type=float, default=4.5, help="of a run of tails at the best rate, before --scale")
    parser.add_argument("--step", action="store_true", help="tails also with a step of what 8 workers need for a batch")
    parser.add_argument("--before", type=lambda path: Path(path).resolve(), help="a worktree, for uniform")
    parser.add_argument("--small", action="store_true", help="one round of a few short runs")
    parser.add_argument("--job", help=SUPPRESS)
    options = parser.parse_args()
    if options.job:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(Namespace(**json.loads(options.job)), folder)))
        return 0
    if options.only == "uniform" and options.before is None:
        parser.error("--only uniform needs --before")
    options.rounds, options.seconds = (1, 0.5) if options.small else (options.rounds, options.seconds)
    is_met = True
    for table in (tails, stuck, uniform):
        if options.only not in (None, table.__name__) or (table is uniform and not options.before):
            continue
        for number, row in enumerate(table(options)):
            cells = [("yes" if each else "**no**") if isinstance(each, bool) else str(each) for each in row]
            print("|", " | ".join(cells), "|" if number else f"|\n|{'---|' * len(cells)}", flush=True)
            is_met &= row[-1] is not False
        print()
    return 0 if is_met or options.small else 1


if __name__ == "__main__":
    sys.exit(main())
