"""Arithmetic on a first batch: how many workers keep up with the step, and what a search begins with.

workers   1.15 x fetch seconds / step seconds + 1, at most cores x fetch seconds / CPU seconds of a fetch + 1, rounded
prefetch  4 for up to 4 workers, else 2; never more than `deepest_prefetch`
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune_loader.search.space import MOST_WORKERS, PREFETCH_FACTORS, Context, Space
from autotune_loader.values import TORCH_PREFETCH_FACTOR, LoaderConfig

FEW_WORKERS, DEEP_PREFETCH = 4, 4  # many workers hold enough batches with torch's prefetch
SPARE = 1.15  # fetching varies: workers that keep up exactly do not keep up
COMPUTING_SHARE = 0.5  # workers that use the CPU for more of a batch's time than this compute; the others wait
SLOW_BATCH_S = 0.5  # where fetching and stepping take longer, a burst without workers takes seconds


def plain_rule(
    *,
    fetch_s: float,
    fetch_cpu_s: float,
    step_s: float,
    cores: int,
    max_workers: int = MOST_WORKERS,
    deepest: int = DEEP_PREFETCH,
) -> LoaderConfig:
    """The configuration that the rule chooses, from wall and CPU seconds of a worker's batch and seconds of a step, maybe 0."""
    keep_up, fill_the_cores = enough_workers(fetch_s, fetch_cpu_s, step_s, cores)
    workers = round(min(SPARE * keep_up, fill_the_cores, MOST_WORKERS) + 1)
    prefetch = DEEP_PREFETCH if workers <= FEW_WORKERS else TORCH_PREFETCH_FACTOR
    return LoaderConfig().with_workers(min(workers, max_workers), min(prefetch, deepest))


def enough_workers(fetch_s: float, fetch_cpu_s: float, loop_s: float, cores: float) -> tuple[float, float]:
    """How many workers keep the loop busy, and how many fill the cores: fewer of both are enough."""
    keep_up = fetch_s / loop_s if loop_s > 0 else math.inf
    return keep_up, cores * (max(fetch_s / fetch_cpu_s, 1.0) if fetch_cpu_s > 0 else math.inf)


def deepest_prefetch(context: Context) -> int:
    """The deepest queue that is worth measuring.

    It is shallow where workers compute, and the step either has several threads or outruns the cores. While workers fill their
    queues, such threads wait for cores: beside four workers with a prefetch of 8 a step of 4 ms took 500 on two cores. Where
    the cores cannot keep up, no queue is full in training, but a short burst ends before a deep one does: what trains at 757
    samples/s was read as 669 from empty queues, as 897 from full ones (studies/regret/README.md).
    """
    computes = context.fetch_s is not None and context.fetch_cpu_s > COMPUTING_SHARE * context.fetch_s
    falls_short = context.usable_cores * (context.step_s or 0.0) < context.fetch_cpu_s
    return TORCH_PREFETCH_FACTOR if computes and (context.step_cores > 1 or falls_short) else max(PREFETCH_FACTORS)


def begin_with(
    space: Space, context: Context, *, own: LoaderConfig | None = None, suggested: Sequence[LoaderConfig] = ()
) -> list[LoaderConfig]:
    """What to measure first, each legal, none twice: the user's own workers, suggestions, what the rule makes of a first batch.

    Where the first batch is unknown, as many workers as cores are tried. No workers come last, and where batches are slow not
    at all: their rate follows from the first batch and the step.
    """
    rule = LoaderConfig().with_workers(min(context.usable_cores, space.max_workers))
    if context.fetch_s is not None:
        rule = plain_rule(
            fetch_s=context.fetch_s,
            fetch_cpu_s=context.fetch_cpu_s,
            step_s=context.step_s or 0.0,
            cores=context.usable_cores,
            max_workers=min(space.max_workers, context.epoch_batches or space.max_workers),
            deepest=deepest_prefetch(context),
        )
    wanted = [*([own] if own is not None and own.num_workers else []), *suggested]
    wanted.append(space.config({"num_workers": rule.num_workers, "prefetch_factor": rule.prefetch_factor}))
    if (context.fetch_s or 0.0) + (context.step_s or 0.0) <= SLOW_BATCH_S:
        wanted.append(space.config({"num_workers": 0}))
    return list({config.key(): config for config in wanted if space.holds(config)}.values())
