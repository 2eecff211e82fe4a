"""Changes of the best configuration that the twin knows nothing of: what to try, and which of them are faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autotune_loader.decision.selection import cost
from autotune_loader.decision.space import UNMODELLED, Space
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.trial import Trial

BUSY_SHARE = 0.9
"""Workers of a right-sized variant are busy for no more than this share of their time."""


def variants(space: Space, fastest: Callable[[], Trial | None]) -> Iterator[LoaderConfig]:
    """The fastest configuration with each value that the twin knows nothing of, one knob after the other.

    Args:
        space: the legal configurations.
        fastest: the fastest trial so far, asked again for each knob.
    """
    for knob in UNMODELLED:
        best = fastest()
        if best is not None:
            yield from space.variants(best.config, knob)


def count_variants(space: Space) -> int:
    """How many trials the variants of one configuration take."""
    return sum(len(getattr(space, axis)) - 1 for axis in UNMODELLED.values())


def may_grow_to(batch_size: int | None, trials: Sequence[Trial]) -> bool:
    """Whether no smaller batch failed yet: what took a device's memory at twice the size takes it at four times."""
    fell = [trial.config.batch_size for trial in trials if trial.failure is not None]
    return batch_size is None or all(size is None or size > batch_size for size in fell)


def faster_variants(trials: Sequence[Trial], space: Space, tolerance: float) -> list[LoaderConfig]:
    """Of the variants the fastest and the cheapest as fast, where they beat what the twin knows."""
    rates = {trial.config: trial.samples_per_s or 0.0 for trial in trials}
    modelled = max((rate for config, rate in rates.items() if space.is_modelled(config)), default=0.0)
    others = [config for config in rates if not space.is_modelled(config)]
    fastest = max(others, key=lambda config: rates[config], default=None)
    if fastest is None or rates[fastest] <= modelled * (1 + tolerance / 2):
        return []
    near = [config for config in others if rates[config] >= rates[fastest] * (1 - tolerance)]
    return list(dict.fromkeys([fastest, min(near, key=lambda config: cost(config, space))]))


def right_sized(config: LoaderConfig, burst: Measurement) -> LoaderConfig:
    """The configuration with as few workers as its burst shows to suffice."""
    busy = burst.samples_per_s.value / burst.batch_size * burst.service_s
    fewer = math.ceil(busy / BUSY_SHARE)
    return replace(config, num_workers=fewer) if 0 < fewer < config.num_workers else config
