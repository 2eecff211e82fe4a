"""What a deeper queue brings: `python -m studies.regret.depth studies/regret/results/real.jsonl ...`.

For each workload of the records, ln(rate with prefetch 8 / rate with prefetch 2) of the same workers and step threads: its
mean in the survey, whose windows take half a second, and in the rounds, whose windows take 1.2 s, with its standard error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from autotune_loader.config import LoaderConfig
from studies.regret.oracle import config_of
from studies.regret.real import Log

SHALLOW, DEEP = 2, 8


def log_ratios(rates: Mapping[str, float]) -> list[float]:
    """Of every pair that differs in the prefetch alone; whether workers persist makes no difference to a window."""
    of_config: dict[LoaderConfig, float] = {}
    for text, rate in rates.items():
        if rate > 0:
            of_config.setdefault(replace(config_of(text), persistent_workers=False), rate)
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
            surveyed = log_ratios(known.surveyed)
            raced = [each for latest in [*known.rounds, *known.confirming] for each in log_ratios(latest.rates)]
            survey = f"{fmean(surveyed):+.3f}" if surveyed else "-"
            rounds = f"{fmean(raced):+.3f} +- {stdev(raced) / math.sqrt(len(raced)):.3f}" if len(raced) > 1 else "-"
            print(f"  {workload:16} survey {survey:8} ({len(surveyed)} pairs)   rounds {rounds} ({len(raced)})")


if __name__ == "__main__":
    main()
