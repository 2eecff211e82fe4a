"""Does the tuner find the best number of workers, how soon, and at what cost? On simulated machines, in seconds of one core.

python -m studies.live.simulated                       # 40 machines, undisturbed, from 0 and from 2 workers
python -m studies.live.simulated --disturbed           # 10 minutes with evaluations, hiccups, ranks ...: about 40 minutes
python -m studies.live.simulated --disturbed --machines 10 --seed 1000 --only ranks hiccups
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
from functools import partial
from typing import Any

from autotune_loader.values import LoaderConfig
from tests.support.training import Training, together

MINUTE_S, SETTLED_S, TEN_MINUTES_S, LOOKED_S = 60.0, 60.0, 600.0, 60.0
WORKERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
BEST_OF = 3
"""So many numbers of workers, the fastest of the first minute, are run for all ten."""
DISTURBANCES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "evaluations of 20 s every 100 steps": {"evaluate_every": 100},
    "hiccups of 12 s every 100 s": {"hiccup_every_s": 100.0},
    "sync every 50 steps": {"sync_every": 50},
    "fetches get 3 x slower": {"drift": 3.0},
    "fetches get 3 x faster": {"drift": 1 / 3},
    "noisy neighbours": {"neighbour": 1.5, "noise": 0.1},
    "slow batches": {},
    "4 ranks in lock step": {},
}


def _job(seed: int, disturbance: str) -> list[Training]:
    more = dict(DISTURBANCES[disturbance])
    if disturbance == "slow batches":
        rng = random.Random(seed)
        more |= {"fetch_s": 10 ** rng.uniform(0.0, 0.9), "step_s": 10 ** rng.uniform(-1.5, 0.3), "epoch_batches": 100_000}
    if disturbance == "sync every 50 steps":
        more["launch_s"] = 0.0005
    ranks = 4 if "ranks" in disturbance else 1
    jobs = [Training.drawn(seed, **more) for _ in range(ranks)]
    for rank, job in enumerate(jobs):
        job._random.seed(seed * 10 + rank)
    return jobs


def _fixed(seed: int, disturbance: str, workers: int, seconds: float) -> tuple[float, float]:
    """Samples/s of the first minute, and of the others."""
    jobs = [each.fixed(LoaderConfig(num_workers=workers)) for each in _job(seed, disturbance)]
    none = [None] * len(jobs)
    first = together(jobs, none, MINUTE_S)
    return first, together(jobs, none, seconds - MINUTE_S) if seconds > MINUTE_S else 0.0


def shares(seed: int, disturbance: str = "nothing", seconds: float = TEN_MINUTES_S) -> list[tuple[Any, ...]]:
    """From 0 and from 2 workers: rates of the first minute and of the others, over those of the best fixed number; how it ended."""
    firsts = {workers: _fixed(seed, disturbance, workers, MINUTE_S)[0] for workers in WORKERS}
    runners = sorted(WORKERS, key=lambda each: -firsts[each])[:BEST_OF]
    fixed = {workers: _fixed(seed, disturbance, workers, seconds)[1] for workers in runners}
    best = max(fixed, key=lambda each: fixed[each])
    found = []
    for asked in (0, 2):
        jobs = _job(seed, disturbance)
        tuners = [each.tuner(LoaderConfig(num_workers=asked)) for each in jobs]
        first = together(jobs, tuners, MINUTE_S)
        later = together(jobs, tuners, seconds - MINUTE_S)
        ended = [each.best.num_workers for each in tuners]
        found.append((later / fixed[best], first / max(firsts.values()), best, ended, seed, asked, tuners[0].own_s))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disturbed", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="words of the disturbances")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the simulated training")
    parser.add_argument("--worst", type=int, default=0, help="tell so many of the worst machines")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seconds = options.seconds or (TEN_MINUTES_S if options.disturbed else MINUTE_S + 2 * SETTLED_S)
    names = [each for each in DISTURBANCES if not options.only or any(word in each for word in options.only)]
    print("| disturbance | later: median | 10 % are below | worst (goal 97 %) | first minute: mean (goal 93 %) |")
    print("|---|---|---|---|---|")
    with multiprocessing.Pool(options.jobs) as pool:
        for name in names if options.disturbed else names[:1]:
            seeds = range(options.seed, options.seed + options.machines)
            job = partial(shares, disturbance=name, seconds=seconds)
            found = sorted(sum(pool.map(job, seeds, chunksize=1), start=[]))
            later, first = [each[0] for each in found], [each[1] for each in found]
            tenth = later[len(later) // 10]
            print(
                f"| {name} | {statistics.median(later):.1%} | {tenth:.1%} | {later[0]:.1%} | {statistics.fmean(first):.1%} |",
                flush=True,
            )
            for each in found[: options.worst]:
                print("    later %.3f first %.3f best %d ended %s seed %d asked %d own %.2f s" % each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
