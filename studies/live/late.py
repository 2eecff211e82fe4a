"""Are batches in order as fast as batches out of order, where some samples are late? Each run is a process of its own.

    python -m studies.live.late --only tails                # about six minutes a round
    python -m studies.live.late --only tails --step         # with steps, too
    python -m studies.live.late --only stuck
    python -m studies.live.late --only uniform --before ../earlier   # against another worktree
    python -m studies.live.late --small                     # under a minute; shows that the study works, and ends with 0

AutoLoader keeps its workers here, as its tuner is never due, but their number might change. What is compared takes turns;
ratios are those of a round. Cells: the median of the rounds (the least..the most). Where a bar is missed, the row says
**no**, and the exit status is 1. The bars: >= 0.95 of in_order=False, with batches of one sample 0.77; one read of 20 s
keeps the loop for at most 1 s and leaves no process; where no sample is late, >= 0.99 of the other worktree, in CPU and wall.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader

from studies.processes import ROOT, last_line

USUAL_S, WORKERS = 0.002, 8
SLOW_EVERY, SLOW_AT, SLOW_S = 32, 20, 0.2
TAILS = {"slow": "1 of 32 waits 200 ms", "tenth": "1 in 10 waits ten times", "pareto": "Pareto 1.5"}
BARS = {1: 0.77, 8: 0.95, 32: 0.95}
"""Of in_order=False, by the samples of a batch."""
LONGEST_S, AS_BEFORE = 1.0, 0.99
Row = tuple[str, bool]
"""And whether its bars are met."""


class Run(NamedTuple):
    """What a process measures: `impl` is in_order, any_order or auto; `stuck_s` is what one read takes."""

    impl: str
    job: str
    size: int
    batches: int
    workers: int = WORKERS
    scale: float = 1.0
    step_s: float = 0.0
    stuck_s: float = 0.0


def waits_of(job: str, samples: int) -> list[float]:
    rng = random.Random(0)
    if job == "slow":
        return [SLOW_S if index % SLOW_EVERY == SLOW_AT else USUAL_S for index in range(samples)]
    if job == "tenth":
        return [10 * USUAL_S if rng.random() < 0.1 else USUAL_S for _ in range(samples)]
    if job == "pareto":  # a median of 2 ms, and 1 s at most
        return [min(1.0, USUAL_S * 0.5 ** (1 / 1.5) * rng.paretovariate(1.5)) for _ in range(samples)]
    return [USUAL_S] * samples


class Waits:
    """Samples that are waited for, with random numbers; the first read of one of them is stuck if there is a flag."""

    def __init__(self, waits_s: list[float], stuck_s: float, flag: Path) -> None:
        self.waits_s, self.stuck_s, self.flag = waits_s, stuck_s, flag

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
    """Indices that cost nothing."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def first_of(samples: list[int]) -> int:
    return samples[0]


def loader_of(run: Run, flag: Path) -> Any:
    count = run.size * run.batches
    how: dict[str, Any] = {"batch_size": run.size, "num_workers": run.workers, "prefetch_factor": 2}
    if run.job == "tiny":
        data, how["collate_fn"] = Ready(range(count)), first_of
    else:
        data = Waits([run.scale * each for each in waits_of(run.job, count)], run.stuck_s, flag)  # type: ignore[assignment]
    if run.impl != "auto":
        return DataLoader(data, in_order=run.impl == "in_order", **how)  # type: ignore[arg-type]
    import autotune_loader

    tree = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    if not Path(autotune_loader.__file__).is_relative_to(tree):
        raise RuntimeError(f"{autotune_loader.__file__} is not of {tree}")
    loader = autotune_loader.AutoLoader(data, max_workers=run.workers, **how)  # type: ignore[arg-type]
    loader._known().tuner.wake = math.inf
    return loader


def measured(run: Run) -> dict[str, Any]:
    """What the process of one run finds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values, draws, ends, longest_s, most = hashlib.sha256(), hashlib.sha256(), list[float](), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        loader, begun, cpu_s = loader_of(run, Path(folder, "read")), time.monotonic(), sum(os.times()[:4])
        batches = iter(loader)
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                break
            ends.append(time.monotonic())
            longest_s = max(longest_s, ends[-1] - asked) if len(ends) > 1 else 0.0
            most = max(most, getattr(batches, "_send_idx", 0) - getattr(batches, "_rcvd_idx", 0))
            if run.job != "tiny":
                for digest, each in zip((values, draws), batch, strict=True):
                    digest.update(each.numpy().tobytes())
            if run.step_s:
                time.sleep(run.step_s)
        last = asked  # with the last step
        if loader.num_workers != run.workers or len(ends) != run.batches:
            raise RuntimeError(f"{loader.num_workers} workers and {len(ends)} batches at the end")
        del batches, loader
        gc.collect()
        end_s, cpu_s = time.monotonic() - last, sum(os.times()[:4]) - cpu_s
        time.sleep(0.2)
        run_s, count = ends[-1] - ends[0], len(ends)
        return {
            "rate": (count - 1) / run_s, "wall_us": run_s / (count - 1) * 1e6, "cpu_us": cpu_s / count * 1e6, "most": most,
            "longest_s": longest_s, "whole_s": last - begun, "end_s": end_s, "left": others_of_session(),
            "values": values.hexdigest(), "draws": draws.hexdigest(),
        }  # fmt: skip


def others_of_session() -> int:
    """Processes that this one has started, directly or not, and that still run."""
    found = 0
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            is_other = each.pid != os.getpid() and os.getsid(each.pid) == os.getsid(0)
            found += is_other and each.status() != psutil.STATUS_ZOMBIE
    return found


def in_turns(runs: dict[str, tuple[Run, Path]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each finds in each round with the package of its tree, in an order of each round's own."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in random.Random(number).sample(list(runs), len(runs)):
            run, tree = runs[name]
            path = f"{tree}{os.pathsep}{ROOT}"
            found[name].append(json.loads(last_line(__file__, "--job", json.dumps(run), PYTHONPATH=path)))
    return found


def told(values: list[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def ratios(over: list[dict[str, Any]], under: list[dict[str, Any]], key: str) -> list[float]:
    return [each[key] / its[key] for each, its in zip(over, under, strict=True)]


def are_same(found: list[dict[str, Any]], *keys: str) -> bool:
    return all(len({each[key] for each in found}) == 1 for key in keys)


def verdict(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def tails(options: argparse.Namespace) -> Iterator[Row]:
    names = "in order, /s | in_order=False, /s | AutoLoader, /s | of in_order=False | bar | of in order"
    yield f"| job | samples | batches | step, ms | {names} | most ahead | same batches | within the bar |", True
    yield f"|{'---|' * 13}", True
    steps, jobs = ((False, True) if options.step else (False,)), list(TAILS)[: 2 if options.small else None]
    for is_stepped, job, size in itertools.product(steps, jobs, [8] if options.small else BARS):
        batch_s = statistics.fmean(waits_of(job, 1 << 15)) * size / WORKERS
        batches, step_s = max(WORKERS, round(options.seconds / batch_s)), options.scale * batch_s * is_stepped
        impls = ("in_order", "any_order", "auto")
        runs = {impl: (Run(impl, job, size, batches, WORKERS, options.scale, step_s), ROOT) for impl in impls}
        plain, free, ours = (found := in_turns(runs, options.rounds or 3)).values()
        is_same = are_same(plain + ours, "values") and are_same(ours, "draws")
        of_free, of_plain = ratios(ours, free, "rate"), ratios(ours, plain, "rate")
        is_met = statistics.median(of_free) >= BARS[size]
        rates = " | ".join(told([each["rate"] for each in its], ".0f") for its in found.values())
        told_of = f"{rates} | {told(of_free)} | {BARS[size]} | {told(of_plain)} | {max(each['most'] for each in ours)}"
        head = f"{TAILS[job]} | {size} | {batches} | {1000 * step_s:.2f}"
        yield f"| {head} | {told_of} | {verdict(is_same)} | {verdict(is_met)} |", is_met and is_same


def stuck(options: argparse.Namespace) -> Iterator[Row]:
    stuck_s, batches = (3.0, 400) if options.small else (20.0, 2000)
    yield (
        f"| a read of {stuck_s:.0f} s | longest wait, s | whole, s | its end, s | left | same | within the bar |",
        True,
    )
    yield f"|{'---|' * 7}", True
    impls = {"DataLoader, in order": "in_order", "AutoLoader": "auto"}
    run = Run("", "uniform", 8, batches, scale=options.scale, stuck_s=stuck_s)
    runs = {name: (run._replace(impl=impl), ROOT) for name, impl in impls.items()}
    found = in_turns(runs, options.rounds or 3)
    for name, its in found.items():
        left, is_same = max(each["left"] for each in its), are_same([*itertools.chain(*found.values())], "values")
        is_met = max(each["longest_s"] for each in its) <= LONGEST_S and not left
        seconds = " | ".join(told([each[key] for each in its]) for key in ("longest_s", "whole_s", "end_s"))
        is_ours = name == "AutoLoader"
        verdicts = f"{verdict(is_same)} | {verdict(is_met) if is_ours else ''}"
        yield f"| {name} | {seconds} | {left} | {verdicts} |", is_same and (is_met or not is_ours)


def uniform(options: argparse.Namespace) -> Iterator[Row]:
    us = " | ".join(f"{which}: before, us | now, us | before / now" for which in ("CPU", "wall"))
    yield f"| batches | workers | {us} | bar | within the bar |", True
    yield f"|{'---|' * 10}", True
    for job, workers in itertools.product(("uniform", "tiny"), (2, WORKERS)):
        batches = (10_000 if job == "tiny" else 500 * workers) // (20 if options.small else 1)
        run = Run("auto", job, 8, batches, workers, 1.0 if job == "tiny" else options.scale)
        trees = {"before": (run, options.before), "now": (run, ROOT)}
        before, now = in_turns(trees, options.rounds or (12 if job == "tiny" else 5)).values()
        cells, is_met = list[str](), True
        for key in ("cpu_us", "wall_us"):
            cells += (told([each[key] for each in its], ".0f") for its in (before, now))
            cells.append(told(of_before := ratios(before, now, key), ".3f"))
            is_met &= statistics.median(of_before) >= AS_BEFORE
        yield f"| {job} | {workers} | {' | '.join(cells)} | {AS_BEFORE} | {verdict(is_met)} |", is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tails", "stuck", "uniform"))
    parser.add_argument("--rounds", type=int, help="3; of uniform 5, with tiny batches 12")
    parser.add_argument("--scale", type=float, default=1.0, help="of all waits, so that neighbours matter less")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run of tails where nobody waits in vain")
    parser.add_argument(
        "--step", action="store_true", help="tails also with a step of what the workers need for a batch"
    )
    parser.add_argument("--before", type=lambda path: Path(path).resolve(), help="a worktree, for uniform")
    parser.add_argument("--small", action="store_true", help="one round of a few short runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measured(Run(*json.loads(options.job)))))
        return 0
    if options.only == "uniform" and options.before is None:
        parser.error("--only uniform needs --before")
    if options.small:
        options.rounds, options.seconds = 1, 0.5
    is_met = True
    for table in (tails, stuck, uniform):
        if table.__name__ == options.only or (options.only is None and (table is not uniform or options.before)):
            for row, is_kept in table(options):
                print(row, flush=True)
                is_met &= is_kept
            print()
    return 0 if is_met or options.small else 1


if __name__ == "__main__":
    sys.exit(main())
