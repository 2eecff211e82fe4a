"""The plain rule: what arithmetic on one short look at training gives without any search.

The search begins from it, and it runs in the paired rounds; every table of the studies holds it as a rival.

look      1.5 s of training with 2 workers
workers   1.15 x fetch seconds / step seconds + 1, at most cores x fetch seconds / CPU seconds of a fetch + 1, rounded
none      where fetching in the loop (fetch + step) beats the loop that was seen
prefetch  4 for up to 4 workers, else 2
"""

from __future__ import annotations

import math

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement

# The figures of the rule above.
LOOK_S, LOOK_WORKERS = 1.5, 2
FEW_WORKERS, DEEP_PREFETCH, SHALLOW_PREFETCH = 4, 4, 2  # many workers hold enough batches as it is
SPARE = 1.15
"""Fetching varies, so that workers who keep up exactly do not keep up."""


def plain_rule(
    *, fetch_s: float, fetch_cpu_s: float, step_s: float, loop_s: float, cores: int, most_workers: int | None = None
) -> LoaderConfig:
    """The configuration that the rule chooses.

    Args:
        fetch_s: wall seconds that a worker spends on a batch.
        fetch_cpu_s: CPU seconds of the same.
        step_s: seconds of a training step.
        loop_s: seconds from one batch to the next in the loop that was seen, with `LOOK_WORKERS`.
        cores: that this process may use.
        most_workers: that the caller allows; None for no other limit than the cores.
    """
    if fetch_s + step_s < loop_s:
        return LoaderConfig()
    needed = SPARE * _ratio(fetch_s, step_s)
    useful = cores * _ratio(fetch_s, fetch_cpu_s)
    most = math.inf if most_workers is None else most_workers - 1
    workers = round(min(needed, useful, most) + 1)
    return LoaderConfig(
        num_workers=workers, prefetch_factor=DEEP_PREFETCH if workers <= FEW_WORKERS else SHALLOW_PREFETCH
    )


def plain_rule_of(measured: Measurement, cores: int, most_workers: int | None = None) -> LoaderConfig:
    """The rule on what a burst with workers measured."""
    return plain_rule(
        fetch_s=measured.service_s,
        fetch_cpu_s=measured.service_cpu_s,
        step_s=measured.step_s,
        loop_s=measured.batch_size / max(measured.samples_per_s.value, 1e-12),
        cores=cores,
        most_workers=most_workers,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.inf
