"""Does the tuner find the best number of workers, how soon, and at what cost? On simulated machines, in seconds of one core.

python -m studies.live.simulated                 # 40 machines, from 0 and from 2 workers
python -m studies.live.simulated --machines 300 --seed 100
"""

from __future__ import annotations

import argparse
import statistics
import sys

from autotune_loader.values import LoaderConfig
from tests.support.training import Training

MINUTE_S, SETTLED_S = 60.0, 60.0
WORKERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def shares(seed: int, asked: int) -> tuple[float, float, float]:
    """Rates of a machine, relative to the best fixed number of workers: of the first minute, once settled, and as asked."""
    training = Training.drawn(seed)
    own = LoaderConfig(num_workers=asked)
    tuner = training.tuner(own)
    best = max(training.rate(LoaderConfig(num_workers=workers)) for workers in WORKERS)
    first = training.run(tuner, MINUTE_S)
    training.run(tuner, SETTLED_S)
    return first / best, training.run(tuner, SETTLED_S) / best, training.rate(own) / best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| asked | settled: mean (goal 97 %) | least | first minute: mean (goal 93 %) | least | as asked |")
    print("|---|---|---|---|---|---|")
    for asked in (0, 2):
        found = [shares(seed, asked) for seed in range(options.seed, options.seed + options.machines)]
        first, settled, plain = zip(*found, strict=True)
        means = [statistics.fmean(each) for each in (settled, first, plain)]
        print(
            f"| {asked} | {means[0]:.1%} | {min(settled):.0%} | {means[1]:.1%} | {min(first):.0%} | {means[2]:.1%} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
