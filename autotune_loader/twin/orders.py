"""The batches of a simulated run: what the bursts saw, as quantiles, in another order per draw."""

from __future__ import annotations

import numpy as np

from autotune_loader.twin.calibration import BEST, DRAWS
from autotune_loader.twin.recursion import Floats


def relative(samples: Floats) -> Floats:
    mean = samples.mean()
    return samples / mean if mean > 0 else np.ones_like(samples)


def sequences(pool: Floats, batches: int, rng: np.random.Generator) -> Floats:
    """One order of batches per draw: the pool's quantiles shuffled, so that its mean and tail are there in every run.

    The draws resample the pool; they share the best fit's orders, so that only what was resampled tells them apart.
    """
    quantiles = (np.arange(batches) + 0.5) / batches
    orders = [rng.permutation(batches) for _ in range(BEST)]
    sequences = np.empty((batches, BEST + DRAWS))
    for draw in range(BEST + DRAWS):
        seen = pool if draw < BEST else rng.choice(pool, size=len(pool))
        values = np.quantile(seen, quantiles)
        sequences[:, draw] = (values * (seen.mean() / max(values.mean(), 1e-12)))[orders[draw % BEST]]
    return sequences
