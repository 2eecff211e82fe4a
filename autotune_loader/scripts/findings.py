"""What the batches of a loader that is only watched tell: what binds, and what other settings are expected to bring."""

from __future__ import annotations

import math
from typing import NamedTuple

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.selection import choose
from autotune_loader.decision.space import useful_workers
from autotune_loader.live.blocks import measured
from autotune_loader.live.budgets import Budgets
from autotune_loader.live.prospects import TOLERANCE
from autotune_loader.live.result import result_of
from autotune_loader.live.traces import continuous, step_cores
from autotune_loader.live.tuning import cores_within
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.site import Site
from autotune_loader.results.result import TuningResult
from autotune_loader.scripts.batch_log import BatchLog
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Z_95, Interval

MOST_BATCHES = 1024
"""Of the latest batches so many are looked at."""
FEWEST_ROUNDS = 3
"""Batches of each worker, at least."""
SHORTEST_S = 0.3
"""Of training that says anything."""


class Findings(NamedTuple):
    """What is known; None where it is not."""

    result: TuningResult | None = None
    expected: tuple[LoaderConfig, Interval] | None = None
    """The settings that are believed to be best, and how many times as fast they would be."""


def findings_of(log: BatchLog, site: Site, own: LoaderConfig, epoch_batches: int | None) -> Findings:
    """What the latest batches of a loader with these settings tell; `epoch_batches` is None where that is unknown."""
    traces = continuous(log.latest(MOST_BATCHES))
    is_too_short = not traces or traces[-1].step_end - traces[0].requested < SHORTEST_S
    if is_too_short or len(traces) < FEWEST_ROUNDS * max(1, own.num_workers) + 1:
        return Findings()
    shape = BatchShape(bytes=log.batch_bytes, tensors=log.batch_tensors)
    seen = measured(traces, own.num_workers, shape)
    context = TwinContext(
        usable_cores=cores_within(None), consumer_cores=step_cores(traces, list(log.cpu)), epoch_batches=epoch_batches
    )
    space = Budgets().search_space(useful_workers(context.usable_cores, [seen]), own, shape)
    beliefs = Beliefs(space, context)
    beliefs.log.add(Evidence(config=own, outcome=seen, phase="compare"))
    result = result_of(
        beliefs,
        site=site,
        asked=own,
        best=own,
        seconds=log.active_s,
        said=(),
    )
    return Findings(result, _expected(beliefs, own))


def _expected(beliefs: Beliefs, own: LoaderConfig) -> tuple[LoaderConfig, Interval] | None:
    posterior = beliefs.posterior()
    if posterior is None or own.key() not in posterior.configs:
        return None
    best, _ = choose(posterior, beliefs.space, TOLERANCE)
    mean, sd = posterior.ratio(posterior.configs.index(best), posterior.configs.index(own.key()))
    low, value, high = (math.exp(mean + z * sd) for z in (-Z_95, 0.0, Z_95))
    return best, Interval(value=value, low=low, high=high, count=1)
