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
from autotune_loader.report.units import bytes_text, counted, seconds_text
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig


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


def growth_warning(evidence: Evidence) -> str | None:
    """What memory that grew while measuring comes to by the end of an epoch, where that is more than there is.

    Pages that forked workers share with the training process are copied one by one as their samples are first touched
    (pytorch#13246). A sample is touched once an epoch whatever the number of workers, but none of them can copy more than the
    training process holds: so fewer workers end up with less.
    """
    memory, limit = (
        evidence.measurement.memory,
        evidence.space.limits.memory_bytes if evidence.space is not None else None,
    )
    if memory is None or not memory.pss_slope_bytes_per_s or limit is None or evidence.epoch_batches is None:
        return None
    epoch_s = evidence.epoch_batches * evidence.period_s
    grown = memory.pss_slope_bytes_per_s * epoch_s
    held = memory.taken_bytes
    if held + grown <= SAFE_SHARE * limit:
        return None
    sentence = (
        f"memory grew by {bytes_text(memory.pss_slope_bytes_per_s)} a second; if it goes on, an epoch of "
        f"{seconds_text(epoch_s)} ends with {bytes_text(held + grown)}, and there are {bytes_text(limit)}"
    )
    if not evidence.best.num_workers:
        return sentence
    fitting = _workers_that_fit(evidence, grown, SAFE_SHARE * limit)
    fits = "fewer workers may not help" if fitting is None else f"{counted(fitting, 'worker')} would fit"
    return (
        f"{sentence}: {fits}. Forked workers copy what they touch of Python objects: keep large lists and dicts as one array "
        "or tensor (pytorch#13246)"
    )


def _workers_that_fit(evidence: Evidence, grown_bytes: float, limit_bytes: float) -> int | None:
    """The most workers, fewer than now, that fit even when each has copied all it can."""
    model = evidence.memory_model()
    if model is None:
        return None
    for count in reversed(range(evidence.best.num_workers)):
        config = replace(evidence.best, num_workers=count) if count else LoaderConfig()
        if model.peak_bytes(config) + min(grown_bytes, count * model.base_bytes) <= limit_bytes:
            return count
    return None


def _larger(best: LoaderConfig, space: Space) -> Iterator[LoaderConfig]:
    """The best with more workers, and as deep a queue as it has now."""
    for count in space.worker_counts():
        if count > best.num_workers:
            yield replace(best, num_workers=count, prefetch_factor=best.prefetch_factor or TORCH_PREFETCH_FACTOR)


def _lack(
    config: LoaderConfig, evidence: Evidence, space: Space
) -> tuple[Literal["memory", "shared memory"], float, int] | None:
    """What there is too little of for a configuration: its name, the need, and what there is."""
    limits = space.limits
    in_flight = config.batches_in_flight * evidence.measurement.batch_bytes
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
