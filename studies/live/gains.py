"""What do `tune()` and AutoLoader bring beside the fastest setting of DataLoader? The table of README.

    python -m studies live.gains                     # seven jobs, about 20 minutes
    python -m studies live.gains --only jpeg --rounds 3

DataLoader's fastest setting is the fastest of a grid of workers, each run once. Then it, DataLoader without workers, what
`tune()` chose and AutoLoader with the workers that it found take turns, each once a round, and are timed by a stopwatch around
plain training loops. Seconds are those of `tune()`, and until the last change of an AutoLoader that begins from nothing.
Nothing is judged again, and no job is left out.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader, tune
from autotune_loader.bursts.step import build_step
from autotune_loader.demo import job as demo_job
from autotune_loader.pipeline.workload import TrainingSide
from studies.live.transfer import image
from studies.study import Row, Table
from studies.verdict import ratio
from studies.workloads import WORKLOADS, AccelStep, Items, StudyWorkload, accelerated

WORKERS = (0, 1, 2, 4, 8, 16, 32)
"""Of the grid."""
WITHIN = 0.98
"""What tune() chose is surely slower than the fastest setting where the interval lies below."""
BAR = "tune()'s choice is not surely more than 2% slower than the fastest setting of the grid"


class Job(NamedTuple):
    """A loader of a job as its user has it, its model, and its own step, where it has one."""

    loader: DataLoader[Any]
    model: nn.Module
    train_step: Callable[[nn.Module, Any], Any] | None = None


def of(study: StudyWorkload) -> Job:
    return Job(study.loader(), study.model, study.train_step)


def slow_step() -> Job:
    """JPEG files before a step that takes longer than loading them: nothing to gain but the wait."""
    study = WORKLOADS["jpeg"]()
    return Job(study.loader(), study.model, AccelStep(0.4))


JOBS: dict[str, Callable[[], Job]] = {
    "small JPEG files, a store with 20 ms (simulated)": lambda: Job(*demo_job()),
    "JPEG files on disk, a CNN on the CPU": lambda: of(WORKLOADS["jpeg"]()),
    "JPEG files on disk, a step of 0.4 s (simulated)": slow_step,
    "augmentation in Python loops, a step of 10 ms (simulated)": lambda: of(WORKLOADS["python_loops"]()),
    "samples that wait 4 ms, a step of 12 ms (simulated)": lambda: of(WORKLOADS["wait_behind_step"]()),
    "images as tensors, 19 MB a batch, a step of 1 ms (simulated)": lambda: of(
        accelerated(Items(image, 20_000), 32, 0.001)
    ),
    "rows in memory, a linear model on the CPU": lambda: of(WORKLOADS["in_memory"]()),
}


def rate(loader: Any, step: Callable[[Any], Any], size: int, seconds: float) -> float:
    """Samples/s of a training loop, epoch after epoch, after a first part of so many seconds or of all workers' batches."""
    begun, opened, count = time.perf_counter(), 0.0, 0
    skipped = 2 + 2 * loader.num_workers * (loader.prefetch_factor or 0)
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        step(batch)
        now = time.perf_counter()
        if opened:
            count += 1
            if now - opened > seconds and count > 2 * loader.num_workers:
                break
        elif now - begun > seconds or (skipped := skipped - 1) < 0:
            opened = now
    return count * size / (now - opened)


def settled(job: Job, step: Callable[[Any], Any], seconds: float) -> tuple[AutoLoader[Any], float]:
    """An AutoLoader that began from nothing and trained for so long, and the seconds until its last change."""
    loader = AutoLoader(job.loader, num_workers=None)
    begun, config, changed = time.perf_counter(), loader.config, 0.0
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        step(batch)
        now = time.perf_counter()
        if loader.config != config:
            config, changed = loader.config, now - begun
        if now - begun > seconds:
            return loader, changed
    raise AssertionError("an endless loop has ended")


def row(name: str, make: Callable[[], Job], rounds: int, seconds: float, settle_s: float) -> Row:
    job = make()
    first = next(iter(job.loader))
    step = build_step(TrainingSide(model=job.model, train_step=job.train_step), first).run
    size = job.loader.batch_size or 1
    arguments: dict[str, Any] = {"batch_size": size, "shuffle": True, "drop_last": job.loader.drop_last}

    def plain(workers: int) -> Any:
        return DataLoader(job.loader.dataset, num_workers=workers, **arguments)

    grid = {workers: rate(plain(workers), step, size, seconds) for workers in WORKERS}
    fastest = max(grid, key=grid.__getitem__)
    begun = time.perf_counter()
    result = tune(job.loader, job.model, train_step=job.train_step, progress=False)
    tuned_s = time.perf_counter() - begun
    found, changed_s = settled(job, step, settle_s)
    auto = found.config
    del found
    sides: dict[str, Callable[[], Any]] = {
        "0 workers": lambda: plain(0),
        "fastest": lambda: plain(fastest),
        "tune()": lambda: result.apply_to(job.loader),
        "AutoLoader": lambda: AutoLoader(job.loader, config=auto, tune=False),
    }
    rates = {side: list[float]() for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            rates[side].append(rate(sides[side](), step, size, seconds))
    none, best, chosen, own = (statistics.median(each) for each in rates.values())
    gain = ratio(rates["tune()"], rates["fastest"])
    cells = {"job": name, "DataLoader, 0 workers": none, "its fastest": best, "workers": fastest}
    cells |= {"tune()": chosen, "workers of tune()": result.best.num_workers, "after, s": tuned_s}
    cells |= {"AutoLoader": own, "workers of AutoLoader": auto.num_workers, "last change, s": changed_s}
    cells |= {"tune() / fastest": gain, "AutoLoader / fastest": ratio(rates["AutoLoader"], rates["fastest"])}
    return Row(cells, gain.high >= WITHIN)


def rows(*, only: str = "", rounds: int = 5, seconds: float = 2.0, settle_s: float = 40.0) -> Table:
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    for name, make in JOBS.items():
        if only in name:
            yield row(name, make, rounds, seconds, settle_s)
    yield f"samples/s, medians of {rounds} rounds of {seconds:g} s in turns; intervals are of paired ratios, 99%"
    yield f"torch uses {torch.get_num_threads()} threads for a step on the CPU"
