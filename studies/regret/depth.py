"""What a deeper queue brings: `python -m studies.regret.depth studies/regret/results/real.jsonl ...`.

For each workload of the records, ln(rate with prefetch 8 / rate with prefetch 2) of the same workers and step threads: its
mean in the survey, whose windows take half a second, and in the rounds, whose windows take 1.2 s, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from autotune_loader.config import LoaderConfig
from autotune_loader.policy import modelled
from autotune_loader.stats import mean_interval
from studies.regret.oracle import config_of
from studies.regret.real import Log

SHALLOW, DEEP = 2, 8


def depth_ratios(rates: Mapping[str, float]) -> list[float]:
    """Of every pair that differs in the prefetch, and in nothing else that a window can see."""
    of_config: dict[LoaderConfig, float] = {}
    for text, rate in rates.items():
        if rate > 0:
            of_config.setdefault(modelled(config_of(text)), rate)
    shallow = {
        replace(config, prefetch_factor=DEEP): rate
        for config, rate in of_config.items()
        if config.prefetch_factor == SHALLOW
    }
    return [math.log(of_config[config] / rate) for config, rate in shallow.items() if config in of_config]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.depth", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    for path in parser.parse_args().records:
        print(path)
        for workload, known in Log(path).read().items():
            surveyed = depth_ratios(known.surveyed)
            raced = [each for latest in [*known.rounds, *known.confirming] for each in depth_ratios(latest.rates)]
            survey = f"{fmean(surveyed):+.3f}" if surveyed else "-"
            ratio = mean_interval(raced) if len(raced) > 1 else None
            rounds = f"{ratio.value:+.3f} ({ratio.low:+.3f} to {ratio.high:+.3f})" if ratio else "-"
            print(f"  {workload:16} survey {survey:8} ({len(surveyed)} pairs)   rounds {rounds} ({len(raced)} pairs)")


if __name__ == "__main__":
    main()
