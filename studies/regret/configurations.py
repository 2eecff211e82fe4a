"""What studies of a few configurations of one workload share: how these are named, and the table of what came out."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from autotune_loader.config import LoaderConfig
from studies.regret.oracle import config_of
from studies.workloads import DOCUMENTS, WORKLOADS


def asked_for(module: str, description: str | None, count: int | str = "+") -> tuple[str, list[LoaderConfig]]:
    """The workload and the configurations that the command line names.

    Args:
        module: whose command it is, as `python -m` wants it.
        description: of what it does.
        count: of configurations, as argparse's `nargs`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
    parser.add_argument(
        "configs", nargs=count, type=config_of, help='such as \'{"num_workers": 4, "prefetch_factor": 8}\''
    )
    chosen = parser.parse_args()
    return chosen.workload, chosen.configs


def print_means(
    columns: Sequence[str], rows: Mapping[LoaderConfig, Sequence[Sequence[float]]], number_format: str
) -> None:
    """A table with the mean of each cell's values and its standard error.

    Args:
        columns: their heads.
        rows: of each configuration the values of each column.
        number_format: of both figures, such as ".3f".
    """
    print("| configuration | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for config, cells in rows.items():
        shown = [f"{fmean(each):{number_format}} ± {_standard_error(each):{number_format}}" for each in cells]
        print(f"| {config} | {' | '.join(shown)} |")


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))
