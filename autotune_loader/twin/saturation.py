"""How much of the cores' time workers take: from where on a further one would only wait for a core.

A worker computes, on cores that it shares fairly with the others, then it waits (storage, network, sleep), and begins the next
batch. That is the machine repairman's queue: workers are the machines, cores the repairmen. What is taken depends on the mean
waiting over the mean computing alone, and not on how either varies (F. Baskett, K. Chandy, R. Muntz and F. Palacios, 1975:
processor sharing). What does depend on it is how long workers wait for their turn to hand over where batches go in order.
"""

from __future__ import annotations

import math

import numpy as np

from autotune_loader.twin.recursion import Floats

TURN_LOSS = 0.63
"""While they wait for their turn workers lose TURN_LOSS ln(workers) variation^2 / prefetch of their time. So much, within a
third, did 4 to 64 workers on as many cores lose in event simulations (variation 0.5, prefetch 2 to 8)."""
MOST_LOST = 0.9


def taken_share(workers: Floats, cores: float, waiting: float) -> Floats:
    """Share of the cores' time that so many workers take, from 0 to 1.

    Args:
        workers: how many there are, shape (n,); parts of a worker count in proportion.
        cores: usable cores.
        waiting: seconds in which a worker waits, over those for which it needs a core.
    """
    whole = np.arange(math.ceil(workers.max(initial=0.0)) + 1)
    share: Floats = np.interp(workers, whole, [_taken_by(int(count), cores, waiting) for count in whole])
    return share


def at_their_turn(workers: Floats, prefetch: Floats, variation: float) -> Floats:
    """How many workers do the work of these, who wait for their turn now and then because batches are handed over in order.

    Args:
        workers: how many there are, shape (n,), each at least 1.
        prefetch: batches that each is handed ahead, shape (n,).
        variation: of the service times, standard deviation over mean.
    """
    lost = np.minimum(TURN_LOSS * np.log(workers) * variation**2 / prefetch, MOST_LOST)
    left: Floats = workers * (1.0 - lost)
    return left


def _taken_by(workers: int, cores: float, waiting: float) -> float:
    if waiting <= 0:
        return min(1.0, workers / cores)
    at_core = np.arange(workers + 1)
    # Ways to choose who is there, each weighted by how long its computing takes against waiting, on as many cores as there are.
    steps = np.log(workers - at_core[:-1]) - np.log(waiting) - np.log(np.minimum(at_core[1:], cores))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    probability = np.exp(logs - logs.max())
    return float(np.minimum(at_core, cores) @ probability / probability.sum() / cores)
