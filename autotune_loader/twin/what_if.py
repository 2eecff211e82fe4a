"""The twin of the same job with cheaper stages: what is computed and what is waited for shrinks by what a stage has of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune_loader.twin.model import Twin
from autotune_loader.values.stages import HAND_OVER, StageTime

LEAST_LEFT = 1e-3
"""A fetch that takes nothing at all would be one that is made infinitely often."""


def with_stages(twin: Twin, times: Sequence[StageTime], factors: Mapping[str, float]) -> Twin:
    """The twin if stages took so many times what they take: 0.5 is half, 0 nothing.

    Args:
        twin: of the job as it is.
        times: where a sample's time goes.
        factors: by the stage's name.

    Raises:
        TypeError: no mapping.
        ValueError: a stage that there is not, or a factor below 0; nothing was watched.
    """
    if not isinstance(factors, Mapping):
        raise TypeError(f"stages={factors!r} names no factors; stages={{'decode': 0.5}} would work")
    known = [each for each in times if each.stage != HAND_OVER]  # it runs beside the fetch
    for name, factor in factors.items():
        _check(name, factor, [each.stage for each in known])
    cpu = _left({each.stage: each.cpu_s for each in known}, factors)
    waiting = _left({each.stage: each.waited_s for each in known}, factors)
    contention = twin.calibration.contention
    before = contention.cpu_s + contention.wait_s
    lighter = replace(contention, cpu_s=contention.cpu_s * cpu, wait_s=contention.wait_s * waiting)
    whole = (lighter.cpu_s + lighter.wait_s) / before
    calibration = replace(
        twin.calibration, contention=lighter, serial_service_s=twin.calibration.serial_service_s * whole
    )
    observations = tuple(replace(each, cpu_s=each.cpu_s * cpu) for each in twin.observations)
    return replace(twin, calibration=calibration, observations=observations)


def without_waiting(twin: Twin) -> Twin:
    """The twin if a fetch waited for nothing, and computed as long as it does."""
    contention, serial_s = twin.calibration.contention, twin.calibration.serial_service_s
    computing = replace(contention, wait_s=contention.wait_s * LEAST_LEFT)
    left = (computing.cpu_s + computing.wait_s) / (contention.cpu_s + contention.wait_s)
    return replace(twin, calibration=replace(twin.calibration, contention=computing, serial_service_s=serial_s * left))


def _left(seconds: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Share of the seconds that is left."""
    whole = math.fsum(seconds.values())
    saved = math.fsum((1.0 - factor) * seconds[name] for name, factor in factors.items())
    return max(1.0 - saved / whole, LEAST_LEFT) if whole > 0 else 1.0


def _check(name: str, factor: float, known: Sequence[str]) -> None:
    if not known:
        raise ValueError(
            "no stage is known: no worker was watched; tune(..., stages=True) with a burst of workers would work"
        )
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1) or known
        raise ValueError(f"stages={{{name!r}: {factor!r}}} names no stage; {', '.join(map(repr, near))} would work")
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not is_number or not 0 <= factor < math.inf:
        raise ValueError(f"stages={{{name!r}: {factor!r}}} is no factor of 0 or more; {{{name!r}: 0.5}} would work")
