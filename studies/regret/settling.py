"""After how many batches does a window read what training reads? `python -m studies.regret.settling cpu_bound 5x2 5x8`.

Each configuration, as workers x prefetch, trains for eight seconds, some times, in turns. A window of the oracle's rounds is
read after the queues could have filled 0, 1, 2 and 3 times, over the rate of the same run from there to its end: mean of the
runs and its standard error. The machine must do nothing else.
"""

from __future__ import annotations

import argparse
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from statistics import fmean, stdev

from autotune_loader.config import LoaderConfig
from studies.regret.bench import TimedJob, Timing, batches_until_settled, between_smooth_ends
from studies.regret.oracle import ROUND_S
from studies.workloads import DOCUMENTS, WORKLOADS

RUN_S = 8.0
RUNS = 6
FILLS = (0, 1, 2, 3)


def config_of(shape: str) -> LoaderConfig:
    """Of `8x2`: eight workers with a prefetch of 2."""
    workers, prefetch = map(int, shape.split("x"))
    return LoaderConfig(num_workers=workers, prefetch_factor=prefetch)


def window_shares(ends: Sequence[float], config: LoaderConfig) -> list[float]:
    """Rate of a window after each of `FILLS`, over that of all that follows the last of them.

    Args:
        ends: seconds at which each batch of a run was trained on.
        config: that it ran with.
    """
    settled = between_smooth_ends(list(ends[batches_until_settled(config, FILLS[-1]) :]), config.num_workers)
    shares = []
    for fills in FILLS:
        first = batches_until_settled(config, fills)
        last = bisect_left(ends, ends[first] + ROUND_S)
        batches, seconds = between_smooth_ends(list(ends[first:last]), config.num_workers)
        shares.append(batches / seconds / (settled[0] / settled[1]))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.settling", description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
    parser.add_argument("shapes", nargs="+", help="such as 8x2: eight workers, prefetch 2")
    chosen = parser.parse_args()
    job = TimedJob(chosen.workload)
    shares: dict[str, list[list[float]]] = {shape: [] for shape in chosen.shapes}
    for number in range(RUNS):
        for shape in random.Random(number).sample(chosen.shapes, len(chosen.shapes)):
            config = config_of(shape)
            _, ends = job.run(config, Timing(clock="start", seconds=RUN_S, seed=number))
            shares[shape].append(window_shares(ends, config))
    print("| workers x prefetch | " + " | ".join(f"after {fills} fills" for fills in FILLS) + " |")
    print("|---" * (len(FILLS) + 1) + "|")
    for shape, runs in shares.items():
        columns = list(zip(*runs, strict=True))
        cells = [f"{fmean(each):.3f} ± {stdev(each) / math.sqrt(len(each)):.3f}" for each in columns]
        print(f"| {shape} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
