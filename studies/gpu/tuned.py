"""Does tuning reach what the GPU and the loader allow? A job from end to end, a row of one table.

    python -m studies gpu.tuned                              # a GPU, up to four minutes a job
    python -m studies gpu.tuned --only transformer --rounds 2
    python -m studies gpu.tuned --device sim --quick         # the same code in small, where there is no GPU (see run.sh)

Each thing that was measured is printed at once, a line that begins with RECORD; a run that is cut off keeps them. Figures of
`--quick` say that the code runs, and on the simulated accelerator whether the verdicts are right.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from autotune_loader import LoaderConfig, tune
from autotune_loader.pipeline.batches import accelerator
from autotune_loader.tuning.bursting import Budget
from studies.gpu.jobs import FULL, JOBS, QUICK, VERDICTS
from studies.gpu.training import TUNED, Loop, Rate, configured, in_turns, medians, record_pairs, record_result, recorded
from studies.study import Row, Table

LIVE, BESIDE = "AutoLoader", 3
"""What runs once; and so many of the grid take turns with the tuned one."""
BAR = "95% of the smaller limit; within 2% of the best others of the grid, or faster; the verdict by construction"
REACHED = 0.95


def study(name: str, device: str, rounds: int, seconds: float, *, quick: bool) -> Row:
    """One job from end to end, as a row. The parent's model is on the device before `tune()` is called, as it often is."""
    budget = Budget(seconds, time.monotonic)
    size, budget_s, run_s = (QUICK, 4.0, 0.1) if quick else (FULL, 60.0, 2.0)
    loop = Loop(JOBS[name](size), device, run_s)
    step_limit = recorded(name, "the step alone", loop.step()).samples_per_s
    result = tune(
        loop.job.loader(), loop.model, train_step=loop.job.train_step, device=loop.device, budget=budget_s,
        progress=False,
    )  # fmt: skip
    for line in result.report().splitlines():
        print(line, flush=True)
    record_result(name, result)
    grid = {each: recorded(name, f"grid: {each}", loop.train(each)) for each in _grid(device, quick)}
    others = [each for each in grid if each.key() != result.best.key()]
    best = sorted(others, key=lambda config: grid[config].samples_per_s)[-BESIDE:]
    live = recorded(name, LIVE, loop.live(result.best)).samples_per_s
    loads = [
        recorded(name, f"only load: {each}", loop.train(each, with_step=False)) for each in {result.best, *best[-1:]}
    ]
    limit = min(step_limit, max(each.samples_per_s for each in loads))
    turns: dict[str, Callable[[], Rate]] = {TUNED: partial(loop.train, result.best)}
    turns |= {str(each): partial(loop.train, each) for each in best}
    rates = in_turns(name, turns, rounds, budget)
    told = record_pairs(name, rates, TUNED)
    default, tuned = grid[LoaderConfig()].samples_per_s, medians(rates)[TUNED]
    verdict = result.bottleneck.kind
    is_right = accelerator(device) is None or verdict in VERDICTS[loop.job.binds]  # a CPU has no copies
    cells = {"job (what binds by construction)": f"{name} ({loop.job.binds})"}
    cells |= {"verdict": verdict if is_right else f"{verdict}, which is wrong", "default /s": default}
    cells |= {"tuned /s": tuned, "of the smaller limit": f"{tuned / limit:.1%} of {limit:,.1f}"}
    cells["tuned over the best others of the grid"] = "; ".join(f"{other}: {says}" for other, says in told.items())
    cells["AutoLoader with as many workers, over tuned"] = f"{live / tuned:.2f}x, one run"
    cells["NVML default, tuned"] = f"{_busy([grid[LoaderConfig()]])}, {_busy(rates[TUNED])}"
    cells["tuned with"] = f"{result.best}, in {result.seconds:.0f} s and {len(result.trials)} trials"
    is_slower = any(says.endswith("slower") for says in told.values())
    return Row(cells, is_right and (quick or (tuned >= REACHED * limit and not is_slower)))


def _grid(device: str, quick: bool) -> list[LoaderConfig]:
    """Every number of workers, pageable and pinned."""
    cores = os.cpu_count() or 1
    workers = [0, 2] if quick else sorted({0, 2, *(n for n in (4, 8) if n < cores), cores})
    kinds = sorted({False, device != "cpu"})
    return [LoaderConfig(num_workers=n, pin_memory=is_pinned) for n in workers for is_pinned in kinds]


def _busy(rates: Sequence[Rate]) -> str:
    known = [rate.gpu_util for rate in rates if rate.gpu_util is not None]
    return f"{statistics.median(known):.1%}" if known else "-"


def rows(
    *, only: str = "", device: str = "cuda", rounds: int = 0, seconds: float = math.inf, quick: bool = False
) -> Table:
    """`rounds`: in which the last few take turns, 8 or 2; `seconds`: of a job, fewer rounds where these end before."""
    configured(device)
    torch.backends.cudnn.benchmark = True
    if quick:
        torch.set_num_threads(1)  # more only wait for one another on a busy machine
    for name in JOBS:
        if not only or name in only.split(","):
            yield study(name, device, rounds or (2 if quick else 8), seconds, quick=quick)
