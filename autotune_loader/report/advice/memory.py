"""Whether memory is what keeps more workers away: configurations that ran out of it, or were never tried, as they would.

Ruled out beforehand is what arithmetic and measurements say: batches in flight against shared memory, and the memory that
one more worker was measured to take against the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune_loader.decision.space import SAFE_SHARE, Space
from autotune_loader.report.advice.evidence import Evidence
from autotune_loader.report.units import bytes_text
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
    """Relative gain over the best that fits, as predicted; None where nobody can say."""


def shortage(evidence: Evidence) -> Shortage | None:
    """What memory keeps away: what ran out of it, else what would; None where that is no loss, or nobody can say."""
    tried, untried = list(_failed(evidence)), list(_ruled_out(evidence))
    for found in (tried, untried):
        missed = [each for each in found if each.gain is None or each.gain > MISSED_GAIN]
        if missed:
            return max(missed, key=lambda each: each.gain or 0.0)
    return None


def _failed(evidence: Evidence) -> Iterator[Shortage]:
    """Trials with more workers or a deeper queue that ran out of memory."""
    for each in evidence.trials:
        is_larger = each.config.batches_in_flight > evidence.best.batches_in_flight
        if each.failure is not None and each.failure.kind in MEMORY_FAILURES and is_larger:
            gain = evidence.predicted_gain(each.config)
            if gain is None and each.predicted_samples_per_s is not None:
                gain = each.predicted_samples_per_s / evidence.rate.value - 1
            kind = each.failure.kind
            why = f"{each.config} ran out of it ({kind.replace('_', ' ')})"
            yield Shortage(why=why, is_shared_memory=kind == "shared_memory", has_failed=True, gain=gain)


def _ruled_out(evidence: Evidence) -> Iterator[Shortage]:
    """More workers than fit, each with its gain over the fastest that fits."""
    if evidence.space is None or evidence.twin is None:
        return
    candidates = [evidence.best, *_larger(evidence.best, evidence.space)]
    predicted = evidence.twin.predict_all(candidates)
    rates = dict(zip(candidates, (each.samples_per_s.value for each in predicted), strict=True))
    lacking = {each: lack for each in candidates[1:] if (lack := _lack(each, evidence, evidence.space))}
    fits = max(rate for config, rate in rates.items() if config not in lacking)
    for config, (resource, need, limit) in lacking.items():
        yield Shortage(
            why=f"{config} would take {bytes_text(need)} of {resource}, and there are {bytes_text(limit)}",
            is_shared_memory=resource == "shared memory",
            has_failed=False,
            gain=rates[config] / fits - 1 if fits > 0 else 0.0,
        )


def _larger(best: LoaderConfig, space: Space) -> Iterator[LoaderConfig]:
    """The best with more workers, and as deep a queue as it has now."""
    for count in space.worker_counts():
        if count > best.num_workers:
            yield replace(best, num_workers=count, prefetch_factor=best.prefetch_factor or TORCH_PREFETCH_FACTOR)


def _lack(config: LoaderConfig, evidence: Evidence, space: Space) -> tuple[str, float, int] | None:
    """What there is too little of for a configuration: its name, the need, and what there is."""
    limits, model = space.limits, evidence.memory_model()
    in_flight = config.batches_in_flight * evidence.measurement.batch_bytes
    if limits.shm_bytes is not None and in_flight > SAFE_SHARE * limits.shm_bytes:
        return "shared memory", in_flight, limits.shm_bytes
    # What the measurements make of it; what arithmetic does, before workers were measured.
    is_measured = model is not None and model.worker_bytes is not None
    need = model.peak_bytes(config) if model is not None and is_measured else float(space.memory_need(config))
    if limits.memory_bytes is not None and need > SAFE_SHARE * limits.memory_bytes:
        return "memory", need, limits.memory_bytes
    return None
