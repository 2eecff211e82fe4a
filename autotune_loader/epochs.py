"""Epochs so short that the finals run them whole: start-up and the gaps between epochs are then much of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune_loader.config import LoaderConfig
from autotune_loader.trial import BurstPlan, Failure, Measurement, Probe

SHORT_EPOCH_S = 1.0
MOST_CANDIDATES = 4


class WholeEpochs:
    """A probe whose bursts are of whole epochs."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._probe.burst(config, replace(plan, whole_epochs=True))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        return self._probe.step_ceiling(consumer_threads, plan)


def for_whole_epochs(candidates: Sequence[LoaderConfig], epoch_batches: int) -> list[LoaderConfig]:
    """The candidates that whole epochs can use, and what these may favour: fewer workers, and none."""
    if not candidates:
        return []
    first = candidates[0]
    useful = [config for config in candidates if config.num_workers <= epoch_batches]
    fewer = [config for config in (_capped(first, epoch_batches), _capped(first, 0)) if config != first]
    return list(dict.fromkeys([*useful, *fewer]))[:MOST_CANDIDATES]


def _capped(config: LoaderConfig, most: int) -> LoaderConfig:
    """The configuration with so many workers at most."""
    if config.num_workers <= most:
        return config
    if most:
        return replace(config, num_workers=most)
    return replace(
        config,
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
        in_order=True,
        multiprocessing_context=None,
    )
