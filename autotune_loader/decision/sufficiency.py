"""Workers that are enough for the training loop: with more of them, and all else equal, no rate is higher.

Two bursts differ by whatever the machine does meanwhile, and that hides a few percent of their rates. Within one burst workers
and loop have the same machine: how much more the workers could deliver than the loop takes, the headroom
workers x (receipt + step) / service, hardly depends on it. A loop that need not wait is no slower than one with more workers,
because these can only take cores from its step; a burst that says otherwise was lucky. What more workers can hide is the
travelling of a batch, so that the receipt that counts is the quickest that any burst shows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.twin.contention import sampling_variance
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import Floats
from autotune_loader.twin.stages import loop_s
from autotune_loader.values.config import LoaderConfig

READING_SD = 0.02
"""Relative error of a headroom that no number of batches takes away."""
NEARLY_SUFFICIENT = 0.9
"""Workers that have less headroom are no help in telling how fast more of them are."""
MOST_LOST = 0.999
"""Of the rate; a loss of all of it would have no logarithm."""
WorkerSetup = tuple[int, bool, int | None, int]
"""What decides whether workers suffice, prefetch apart: workers, pinning, the step's threads, device prefetch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """A configuration whose workers were seen to be enough, or nearly so."""

    position: int
    log_headroom: float
    headroom_sd: float
    """Standard deviation of that logarithm."""
    least_loss: float
    """Share of the loop's time that is lost even where the headroom says that none is: service times vary."""
    larger: tuple[int, ...]
    """Positions of the configurations with as many workers or more, and all else equal but the prefetch."""


def fed(configs: Sequence[LoaderConfig], observations: Sequence[Observation], use: Sequence[float]) -> tuple[Fed, ...]:
    """What the bursts show.

    Args:
        configs: the configurations.
        observations: all bursts.
        use: share of the time in which the consumer of each configuration works, as the twin says.
    """
    known = _headrooms(observations)
    alike: dict[LoaderConfig, list[int]] = defaultdict(list)
    for position, config in enumerate(configs):
        if config.num_workers:
            alike[replace(config, num_workers=1, prefetch_factor=1, persistent_workers=False)].append(position)
    found = []
    for group in alike.values():
        for position in group:
            log_headroom, sd = known.get(_worker_setup(configs[position]), (-math.inf, 0.0))
            workers = configs[position].num_workers
            larger = tuple(i for i in group if i != position and configs[i].num_workers >= workers)
            if log_headroom > math.log(NEARLY_SUFFICIENT) and larger:
                found.append(
                    Fed(
                        position=position,
                        log_headroom=log_headroom,
                        headroom_sd=sd,
                        least_loss=1.0 - use[position],
                        larger=larger,
                    )
                )
    return tuple(found)


def raised(paths: Floats, enough: Sequence[Fed]) -> Floats:
    """The same rates, those with enough workers in each path as fast as any with more, but for what these lose.

    Always with the same draws of how far the headroom was misread, so that answers repeat.

    Args:
        paths: logarithms of rates as they may be, shape (paths, configurations).
        enough: whose workers are.
    """
    higher: Floats = paths.copy()
    luck = np.random.default_rng(1).standard_normal(len(paths))
    for each in enough:
        headroom = np.exp(each.log_headroom + each.headroom_sd * luck)
        short = np.clip(np.maximum(1.0 - headroom, each.least_loss), 0.0, MOST_LOST)
        floor = paths[:, list(each.larger)].max(axis=1) + np.log1p(-short)
        higher[:, each.position] = np.maximum(paths[:, each.position], floor)
    return higher


def _headrooms(observations: Sequence[Observation]) -> Mapping[WorkerSetup, tuple[float, float]]:
    """Logarithm of the headroom in bursts of the same workers, one or more, and its standard deviation."""
    with_workers = [seen for seen in observations if seen.num_workers]
    if not with_workers:
        return {}
    # In steps of the same burst: in seconds it would be that of the burst in which everything was quickest.
    quickest: dict[tuple[object, ...], float] = defaultdict(lambda: math.inf)
    for seen in with_workers:
        handing = _worker_setup(seen)[1:]
        quickest[handing] = min(quickest[handing], float(seen.receive_s.mean()) / _step_s(seen))
    bursts: dict[WorkerSetup, list[tuple[float, float]]] = defaultdict(list)
    for seen, variance in zip(with_workers, sampling_variance(with_workers), strict=True):
        setup, step_s = _worker_setup(seen), _step_s(seen)
        loop = step_s * float(loop_s(quickest[setup[1:]], 1.0, seen.device_prefetch))
        log = math.log(seen.num_workers * loop / max(float(seen.service_s.mean()), 1e-12))
        own = float(variance) + float((seen.step_s / loop).var()) / len(seen.step_s)
        bursts[setup].append((log, own + READING_SD**2))
    known = {}
    for setup, each in bursts.items():
        logs, variances = (np.array(values) for values in zip(*each, strict=True))
        precision = float((1 / variances).sum())
        known[setup] = (float((logs / variances).sum()) / precision, math.hypot(precision**-0.5, READING_SD))
    return known


def _step_s(seen: Observation) -> float:
    return max(float(seen.step_s.mean()), 1e-12)


def _worker_setup(of: LoaderConfig | Observation) -> WorkerSetup:
    return (of.num_workers, of.pin_memory, of.consumer_threads, of.device_prefetch)
