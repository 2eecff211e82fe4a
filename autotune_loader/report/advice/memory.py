"""Whether memory is what keeps more workers away: configurations that were never tried, because they would not fit.

What did not fit in a trial is a failure and counts by itself. Here is what arithmetic and measurements rule out beforehand:
batches in flight against shared memory, and the memory that one more worker was measured to take against the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from autotune_loader.decision.space import SAFE_SHARE, Space
from autotune_loader.report.advice.evidence import MISSED_GAIN, Evidence
from autotune_loader.values.config import LoaderConfig

DEFAULT_PREFETCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A configuration that would be faster than all that fit, and does not fit."""

    config: LoaderConfig
    resource: Literal["memory", "shared memory"]
    need_bytes: float
    limit_bytes: int
    gain: float
    """Relative gain over the best that fits, as the twin has both."""


def shortage(evidence: Evidence) -> Shortage | None:
    """The most that memory keeps away; None where that is little, or nobody can say."""
    if evidence.space is None or evidence.twin is None:
        return None
    candidates = list(_larger(evidence.best, evidence.space))
    lacking = {config: lack for config in candidates if (lack := _lack(config, evidence, evidence.space))}
    if not lacking:
        return None
    asked = [evidence.best, *candidates]
    predicted = evidence.twin.predict_all(asked)
    rates = dict(zip(asked, (each.samples_per_s.value for each in predicted), strict=True))
    fits = max(rate for config, rate in rates.items() if config not in lacking)
    config = max(lacking, key=lambda config: rates[config])
    gain = rates[config] / fits - 1 if fits > 0 else 0.0
    if gain <= MISSED_GAIN:
        return None
    resource, need, limit = lacking[config]
    return Shortage(config=config, resource=resource, need_bytes=need, limit_bytes=limit, gain=gain)


def _larger(best: LoaderConfig, space: Space) -> Iterator[LoaderConfig]:
    """The best with more workers, and as deep a queue as it has now."""
    for count in space.worker_counts():
        if count > best.num_workers:
            yield replace(best, num_workers=count, prefetch_factor=best.prefetch_factor or DEFAULT_PREFETCH)


def _lack(
    config: LoaderConfig, evidence: Evidence, space: Space
) -> tuple[Literal["memory", "shared memory"], float, int] | None:
    """What there is too little of for a configuration: its name, the need, and what there is."""
    limits = space.limits
    in_flight = (config.num_workers * (config.prefetch_factor or 0) + 1) * evidence.measurement.batch_bytes
    if limits.shm_bytes is not None and in_flight > SAFE_SHARE * limits.shm_bytes:
        return "shared memory", in_flight, limits.shm_bytes
    need = _memory_need(config, evidence, space)
    if limits.memory_bytes is not None and need > SAFE_SHARE * limits.memory_bytes:
        return "memory", need, limits.memory_bytes
    return None


def _memory_need(config: LoaderConfig, evidence: Evidence, space: Space) -> float:
    """What the measurements make of a configuration; what arithmetic does, before workers were measured."""
    model = evidence.memory_model()
    if model is None or model.worker_bytes is None:
        return float(space.memory_need(config))
    return model.peak_bytes(config)
