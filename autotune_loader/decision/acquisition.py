"""Which configurations to observe: the initial design, the burst that teaches most, the shortlist for paired rounds."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.selection import choose, cost
from autotune_loader.decision.space import Space
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig

WORTHWHILE_SHARE = 0.4
"""A search ends when one more burst of no configuration is expected to gain more than this share of the tolerance."""
RIVAL_SHARE = 0.1
"""Of finalists that leave this much of the tolerance more to be lost than the best of them, the cheapest is taken."""
FINALIST_SHARE = 0.1
"""A further finalist must be expected to save this share of the tolerance."""


def initial_design(space: Space, usable_cores: int) -> tuple[LoaderConfig, ...]:
    """The bursts that the twin is fitted to, where the space has them.

    No worker, one, and as many as there are cores. Where the step's threads are a knob, each count with the cores it leaves as
    workers: that split is often the best, and how a parallel step bears workers shows in no other burst.
    """
    wanted: list[tuple[int, int | None]] = [(workers, None) for workers in (0, 1, usable_cores)]
    wanted += [(max(1, usable_cores - threads), threads) for threads in space.consumer_threads if threads is not None]
    nearest = (_nearest(space, workers, threads) for workers, threads in wanted)
    return tuple(dict.fromkeys(config for config in nearest if config is not None))


def _nearest(space: Space, workers: int, threads: int | None) -> LoaderConfig | None:
    """The legal configuration with these threads and torch's prefetch that comes closest to this many workers."""
    legal = [config for config in space.modelled_configs() if config.consumer_threads == threads]
    plain = [config for config in legal if config.prefetch_factor in (None, TORCH_PREFETCH_FACTOR)] or legal
    return min(plain, key=lambda config: abs(config.num_workers - workers), default=None)


def suggest(
    posterior: Posterior, space: Space, tried: Collection[LoaderConfig], tolerance: float
) -> LoaderConfig | None:
    """The untried configuration of which a burst teaches most; None when the choice is safe or no burst is worth it.

    Args:
        posterior: what is believed.
        space: the legal configurations.
        tried: the keys of those that were tried.
        tolerance: relative difference that counts as equally fast.
    """
    chosen, safe = choose(posterior, space, tolerance)
    if safe:
        return None
    gains = posterior.knowledge_gradient(posterior.configs.index(chosen))
    untried = [index for index, config in enumerate(posterior.configs) if config not in tried]
    best = max(untried, key=lambda i: (round(float(gains[i]), 4), -posterior.configs[i].num_workers), default=None)
    if best is None or gains[best] <= WORTHWHILE_SHARE * tolerance:
        return None
    return posterior.configs[best]


def shortlist(posterior: Posterior, space: Space, tolerance: float, most: int = 2) -> list[LoaderConfig]:
    """The few configurations that deserve fresh rounds: the choice, and those that may well be what it misses.

    Each further one leaves hardly more to be lost than any must, when the best of them all is taken; of such the cheapest.
    """
    chosen, _ = choose(posterior, space, tolerance)
    short = posterior.regret_samples()
    taken = [posterior.configs.index(chosen)]
    left = short[:, taken[0]]
    while len(taken) < most:
        losses = np.minimum(left[:, None], short).mean(axis=0)
        enough = np.flatnonzero(losses <= losses.min() + RIVAL_SHARE * tolerance)
        best = min(map(int, enough), key=lambda i: (cost(posterior.configs[i], space), losses[i]))
        if left.mean() - losses[best] < FINALIST_SHARE * tolerance:
            break
        taken.append(best)
        left = np.minimum(left, short[:, best])
    return [posterior.configs[index] for index in taken]
