"""How much of the cores' time workers take: from where on a further one would only wait for a core.

A worker computes, on cores that it shares fairly with the others, then it waits (storage, network, sleep), and begins the next
batch. That is the machine repairman's queue: workers are the machines, cores the repairmen. What is taken depends on the mean
waiting over the mean computing alone, and not on how either varies (F. Baskett, K. Chandy, R. Muntz and F. Palacios, 1975:
processor sharing). What does depend on it is how long workers wait for their turn to hand over where batches go in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune_loader.config import LoaderConfig
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.recursion import Floats
from autotune_loader.twin.smoothing import relative_variance

TURN_LOSS = 0.63
"""While they wait for their turn workers lose TURN_LOSS ln(workers) variation^2 / prefetch of their time: to a third what event
simulations of 4 to 48 workers on as many cores lose (variation 0.5, prefetch 2 and 8; tests/decision/test_saturation.py)."""
MOST_TURN_LOSS = 0.9
"""Where batches vary beyond what the formula is for."""
WAITING_SD = 0.02
"""Error of what a worker waits, in its computing, that no number of batches takes away."""


def free_share(
    configs: Sequence[LoaderConfig], observations: Sequence[Observation], cores: float | None
) -> tuple[Floats, Floats]:
    """Share of the cores' time that the workers of each configuration leave free, and its standard deviation.

    Args:
        configs: the configurations.
        observations: the bursts, which tell what workers compute and wait.
        cores: that the workers have for themselves; None where that is unknown, and then all counts as free.
    """
    bursts = [seen for seen in observations if seen.num_workers]
    if cores is None or not bursts:
        return np.ones(len(configs)), np.zeros(len(configs))
    # What computing takes shows where the fewest are at work: nobody else is in the caches.
    alone = min(bursts, key=lambda seen: seen.workers_at_work)
    variance = relative_variance(bursts)
    # All else is waiting, but among many workers for a core, too, and at first for cold files: the least is what must be.
    waited_s = min(float(seen.service_s.mean() - seen.cpu_s.mean()) for seen in bursts)
    waiting = max(0.0, waited_s) / max(float(alone.cpu_s.mean()), 1e-12)
    waiting_sd = math.hypot(WAITING_SD, waiting * math.sqrt(variance / len(alone.service_s)))
    workers = np.array([config.num_workers for config in configs], dtype=np.float64)
    prefetch = np.array([config.prefetch_factor or 1 for config in configs], dtype=np.float64)
    in_order = np.array([config.in_order for config in configs])
    at_work = np.where(in_order, at_their_turn(workers, prefetch, math.sqrt(variance)), workers)
    taken = taken_share(at_work, cores, waiting)
    return 1.0 - taken, taken - taken_share(at_work, cores, waiting + waiting_sd)


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
        workers: how many there are, shape (n,).
        prefetch: batches that each is handed ahead, shape (n,).
        variation: of the service times, standard deviation over mean.
    """
    lost = np.minimum(TURN_LOSS * np.log(np.maximum(workers, 1.0)) * variation**2 / prefetch, MOST_TURN_LOSS)
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
