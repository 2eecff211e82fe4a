"""After how many batches does a window read what training reads? `python -m studies.regret.settling cpu_bound CONFIG ...`.

Each configuration, as `loader.json` names it, trains for eight seconds, some times, in turns. A window of the oracle's rounds
is read after the queues could have filled 0, 1, 2 and 3 times, over the rate of the same run after the third: mean of the runs
and its standard error. The machine must do nothing else.
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
from studies.regret.oracle import ROUND_S, config_of
from studies.workloads import DOCUMENTS, WORKLOADS

RUN_S = 8.0
RUNS = 6
TRIED_FILLS = (0, 1, 2, 3)


def window_shares(ends: Sequence[float], config: LoaderConfig) -> list[float]:
    """Rate of a window after each of `TRIED_FILLS`, over that of all that follows the last of them.

    Args:
        ends: seconds at which each batch of a run was trained on.
        config: that it ran with.
    """
    opened = [batches_until_settled(config, fills) for fills in TRIED_FILLS]
    windows = [ends[first : bisect_left(ends, ends[first] + ROUND_S)] for first in opened]
    settled = _rate(ends[opened[-1] :], config)
    return [_rate(window, config) / settled for window in windows]


def _rate(ends: Sequence[float], config: LoaderConfig) -> float:
    batches, seconds = between_smooth_ends(ends, config.num_workers)
    return batches / seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.settling", description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
    parser.add_argument(
        "configs", nargs="+", type=config_of, help='such as \'{"num_workers": 4, "prefetch_factor": 8}\''
    )
    chosen = parser.parse_args()
    job = TimedJob(chosen.workload)
    shares: dict[LoaderConfig, list[list[float]]] = {config: [] for config in chosen.configs}
    for number in range(RUNS):
        for config in random.Random(number).sample(list(shares), len(shares)):
            _, ends = job.run(config, Timing(clock="start", seconds=RUN_S, seed=number))
            shares[config].append(window_shares(ends, config))
    print("| configuration | " + " | ".join(f"after {fills} fills" for fills in TRIED_FILLS) + " |")
    print("|---" * (len(TRIED_FILLS) + 1) + "|")
    for config, runs in shares.items():
        columns = list(zip(*runs, strict=True))
        cells = [f"{fmean(each):.3f} ± {stdev(each) / math.sqrt(len(each)):.3f}" for each in columns]
        print(f"| {config} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
