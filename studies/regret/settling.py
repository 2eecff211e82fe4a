"""After how many batches does a window read what training reads? `python -m studies.regret.settling cpu_bound CONFIG ...`.

Each configuration, as `loader.json` names it, trains for eight seconds, some times, in turns. A window of the oracle's rounds
is read after the queues could have filled 0, 1, 2 and 3 times, over the rate of the same run after the third: mean of the runs
and its standard error. The machine must do nothing else.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

from autotune_loader.config import LoaderConfig
from studies.regret.bench import TimedJob, Timing, batches_until_settled, between_smooth_ends
from studies.regret.configurations import asked_for, print_means
from studies.regret.oracle import ROUND_S

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
    workload, configs = asked_for("studies.regret.settling", __doc__)
    job = TimedJob(workload)
    shares: dict[LoaderConfig, list[list[float]]] = {config: [] for config in configs}
    for number in range(RUNS):
        for config in random.Random(number).sample(list(shares), len(shares)):
            _, ends = job.run(config, Timing(clock="start", seconds=RUN_S, seed=number))
            shares[config].append(window_shares(ends, config))
    by_fills = {config: list(zip(*runs, strict=True)) for config, runs in shares.items()}
    print_means([f"after {fills} fills" for fills in TRIED_FILLS], by_fills, ".3f")


if __name__ == "__main__":
    main()
