"""Does the tuner find the best number of workers, how soon, and at what cost? On simulated machines, in seconds of one core.

python -m studies.live.simulated                       # 40 machines, undisturbed, from 0 and from 2 workers
python -m studies.live.simulated --disturbed           # 10 minutes with evaluations, hiccups, ranks ...: an hour of a core
python -m studies.live.simulated --disturbed --machines 10 --seed 1000 --only ranks hiccups
python -m studies.live.simulated --settle              # 16 cores: seconds until what runs is within 5% of the best
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
import sys
from functools import partial
from typing import Any

from autotune_loader.values import LoaderConfig
from tests.support.training import SAMPLES, Training, together

MINUTE_S, TEN_MINUTES_S = 60.0, 600.0
WORKERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FAST_BATCHES_S = 250.0
"""With `--quick`, faster machines are run for two minutes: by then they have made as many batches as others in ten."""
BEST_OF, TRIED_S = 2, 10.0
"""So many numbers of workers, the fastest of so long a run, are run for all the time."""
DISTURBANCES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "evaluations of 20 s every 100 steps": {"evaluate_every": 100},
    "hiccups of 12 s every 100 s": {"hiccup_every_s": 100.0},
    "sync every 50 steps": {"sync_every": 50, "launch_s": 0.0005},
    "fetches get 3 x slower": {"drift": 3.0},
    "fetches get 3 x faster": {"drift": 1 / 3},
    "noisy neighbours": {"neighbour": 1.5, "noise": 0.1},
    "checkpoints of 5 s every 60 s": {"evaluate_every": 200, "evaluate_s": 5.0, "step_s": 0.3},
    "one fetch in 32 takes 20 times as long": {"tail": 20.0},
    "slow batches": {"epoch_batches": 100_000},
    "3 ranks in lock step": {},
}
SETTLING = {0.02: (3.0, 60.0), 0.3: (10.0, 150.0), 1.0: (30.0, 280.0)}
"""Seconds of a step: the bar, and how long is trained."""
WITHIN, MOSTLY = 0.95, 0.95
"""What runs is within this of the best, for this share of the time from then on."""


def settled(step_s: float, seed: int) -> list[float]:
    """From 0 and from 2 workers: seconds until what runs stays within 5% of the best; infinite where it does not."""
    rng = random.Random(seed)
    fetch_s, cpu = step_s * 10 ** rng.uniform(0.2, 1.3), rng.choice([0.05, 0.5, 1.0])
    job = partial(Training, fetch_s=fetch_s, cpu=cpu, step_s=step_s, cores=16, seed=seed, start_s=0.013)
    _, seconds = SETTLING[step_s]
    rates = dict[tuple[int, int | None], float]()

    def rate(config: tuple[int, int | None]) -> float:
        if config not in rates:
            workers, depth = config
            fixed = job().fixed(LoaderConfig(num_workers=workers, prefetch_factor=depth))
            fixed.run(None, 5 * fetch_s)
            rates[config] = fixed.run(None, max(20.0, 200 * step_s))
        return rates[config]

    best, found = max(rate((each, 2 if each else None)) for each in WORKERS), []
    for asked in (0, 2):
        training = job()
        tuner, ran = training.tuner(LoaderConfig(num_workers=asked)), list[tuple[float, tuple[int, int | None]]]()
        begun = training.now
        while training.now - begun < seconds:
            now = training.now
            training.batch(tuner)
            ran.append((now - begun, (int(training.loader.num_workers), training.loader.prefetch_factor)))
        ran.append((training.now - begun, ran[-1][1]))
        is_good = [rate(config) >= WITHIN * best for _, config in ran]
        good_s, since = 0.0, math.inf
        for at in reversed(range(len(ran) - 1)):
            good_s += (ran[at + 1][0] - ran[at][0]) * is_good[at]
            if is_good[at] and good_s >= MOSTLY * (ran[-1][0] - ran[at][0]):
                since = ran[at][0]
        found.append(since)
    return found


def settling(machines: int, seed: int) -> None:
    print("| step | median, s (bar) | 90% are below | slowest |")
    print("|---|---|---|---|")
    with multiprocessing.Pool(2) as pool:
        for step_s, (bar_s, _) in SETTLING.items():
            job = partial(settled, step_s)
            found = sorted(
                each for both in pool.map(job, range(seed, seed + machines // 2), chunksize=1) for each in both
            )
            median, tenth = statistics.median(found), found[len(found) * 9 // 10]
            print(f"| {step_s:g} s | {median:.1f} ({bar_s:g}) | {tenth:.1f} | {found[-1]:.1f} |", flush=True)


def _job(seed: int, disturbance: str) -> list[Training]:
    more, rng = dict(DISTURBANCES[disturbance]), random.Random(seed)
    if disturbance == "slow batches":
        more |= {"fetch_s": 10 ** rng.uniform(0.0, 0.9), "step_s": 10 ** rng.uniform(-1.5, 0.3)}
    jobs = [Training.drawn(seed, **more) for _ in range(3 if "ranks" in disturbance else 1)]
    for rank, job in enumerate(jobs):
        job._random.seed(seed * 10 + rank)
    return jobs


def _fixed(seed: int, disturbance: str, workers: int) -> tuple[list[Training], list[None]]:
    jobs = [each.fixed(LoaderConfig(num_workers=workers)) for each in _job(seed, disturbance)]
    return jobs, [None] * len(jobs)


def shares(
    seed: int, disturbance: str = "nothing", seconds: float = TEN_MINUTES_S, is_quick: bool = False
) -> list[tuple[float, float]]:
    """From 0 and from 2 workers: rates after the first minute, and of it, over those of the best fixed number.

    Where workers were asked for the best is one of those from 1 up.
    """
    tried_s = 2 * MINUTE_S if disturbance in ("slow batches", "evaluations of 20 s every 100 steps") else TRIED_S
    tried = {workers: together(*_fixed(seed, disturbance, workers), tried_s) for workers in WORKERS}
    firsts, fixed = dict[int, float](), dict[int, float]()
    if is_quick and max(tried.values()) > SAMPLES * FAST_BATCHES_S:
        seconds = min(seconds, 2 * MINUTE_S)
    ranked = sorted(WORKERS, key=lambda each: -tried[each])
    for workers in {*ranked[:BEST_OF], *[each for each in ranked if each][:BEST_OF]}:
        jobs, none = _fixed(seed, disturbance, workers)
        firsts[workers] = together(jobs, none, MINUTE_S)
        fixed[workers] = together(jobs, none, seconds - MINUTE_S)
    found = []
    for asked in (0, 2):
        best = max((each for each in fixed if each >= min(asked, 1)), key=lambda each: fixed[each])
        jobs = _job(seed, disturbance)
        tuners = [each.tuner(LoaderConfig(num_workers=asked)) for each in jobs]
        first = together(jobs, tuners, MINUTE_S)
        later = together(jobs, tuners, seconds - MINUTE_S)
        found.append((later / fixed[best], first / firsts[best]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disturbed", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="words of the disturbances")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the simulated training")
    options = parser.parse_args()
    if options.settle:
        settling(options.machines, options.seed)
        return 0
    seconds = options.seconds or (TEN_MINUTES_S if options.disturbed else 3 * MINUTE_S)
    names = [each for each in DISTURBANCES if not options.only or any(word in each for word in options.only)]
    print("| disturbance | later: median | 10% are below | worst (goal 97%) | first minute: mean (goal 93%) |")
    print("|---|---|---|---|---|")
    with multiprocessing.Pool(2) as pool:
        for name in names if options.disturbed else names[:1]:
            seeds = range(options.seed, options.seed + options.machines)
            job = partial(shares, disturbance=name, seconds=seconds, is_quick=options.quick)
            found = sorted(each for both in pool.map(job, seeds, chunksize=1) for each in both)
            later, first = zip(*found, strict=True)
            median, tenth = statistics.median(later), later[len(later) // 10]
            print(
                f"| {name} | {median:.1%} | {tenth:.1%} | {later[0]:.1%} | {statistics.fmean(first):.1%} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
