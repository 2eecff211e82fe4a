"""Whether memory is what keeps more workers away: configurations that ran out of it, or were never tried, as they would.

Ruled out beforehand is what arithmetic and measurements say: batches in flight against shared memory, and the memory that
one more worker was measured to take against the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune_loader.decision.space import SAFE_SHARE, Space
from autotune_loader.report.advice.evidence import Evidence
from autotune_loader.report.units import bytes_text, seconds_text
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig
from autotune_loader.values.measurement import FailureKind

MEMORY_FAILURES: tuple[FailureKind, ...] = ("memory_guard", "oom_killed", "out_of_memory", "shared_memory")
"""What more memory, of either kind, would have prevented."""
MISSED_GAIN = 0.05
"""A configuration that memory keeps away has to be this much faster to be missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A configuration that would be faster than all that fit, and does not fit."""

    why: str
    """What it would take, or what became of it."""
    is_shared_memory: bool
    has_failed: bool
    """Whether it was tried."""
    gain: float | None
    """Relative gain over the best that fits, as the twin has both; None where nobody can say."""


def shortage(evidence: Evidence) -> Shortage | None:
    """What memory keeps away: what ran out of it, else what would; None where that is no loss, or nobody can say."""
    return _failed(evidence) or _untried(evidence)


def _failed(evidence: Evidence) -> Shortage | None:
    """Trials with more workers or a deeper queue that ran out of memory, and might have been faster."""
    missed: list[tuple[LoaderConfig, FailureKind, float | None]] = []
    for each in evidence.trials:
        is_larger = each.config.batches_in_flight > evidence.best.batches_in_flight
        if each.failure is not None and each.failure.kind in MEMORY_FAILURES and is_larger:
            gain, before = evidence.predicted_gain(each.config), each.predicted_samples_per_s
            if gain is None and before is not None:
                gain = before / evidence.rate.value - 1
            if gain is None or gain > MISSED_GAIN:
                missed.append((each.config, each.failure.kind, gain))
    if not missed:
        return None
    config, kind, _ = min(missed, key=lambda each: each[0].num_workers)
    return Shortage(
        why=f"{config} ran out of it ({kind.replace('_', ' ')})",
        is_shared_memory="shared_memory" in (kind for _, kind, _ in missed),
        has_failed=True,
        gain=max((gain for _, _, gain in missed if gain is not None), default=None),
    )


def _untried(evidence: Evidence) -> Shortage | None:
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
    return Shortage(
        why=f"{config} would take {bytes_text(need)} of {resource}, and there are {bytes_text(limit)}",
        is_shared_memory=resource == "shared memory",
        has_failed=False,
        gain=gain,
    )


def growth_warning(evidence: Evidence) -> str | None:
    """What memory that grew while measuring comes to by the end of an epoch, where that is more than there is.

    Pages that forked workers share with the training process are copied one by one as their samples are first touched
    (pytorch#13246). No worker can copy more than the training process holds: so fewer workers end up with less.
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
    return (
        f"{sentence}: fewer workers copy less. Forked workers copy what they touch of Python objects: keep large lists and "
        "dicts as one array or tensor (pytorch#13246)"
    )


def _larger(best: LoaderConfig, space: Space) -> Iterator[LoaderConfig]:
    """The best with more workers, and as deep a queue as it has now."""
    for count in space.worker_counts():
        if count > best.num_workers:
            yield replace(best, num_workers=count, prefetch_factor=best.prefetch_factor or TORCH_PREFETCH_FACTOR)


def _lack(config: LoaderConfig, evidence: Evidence, space: Space) -> tuple[str, float, int] | None:
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
