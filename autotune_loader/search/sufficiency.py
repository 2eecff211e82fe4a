"""Configurations whose workers keep the step busy; adding workers cannot make them faster.

Two bursts differ by whatever the machine does meanwhile, and that hides a few percent of their rates. Within one burst workers
and loop have the same machine: how much more the workers could deliver than the loop takes, the headroom
workers x (receipt + step) / service, hardly depends on it. A loop that need not wait is no slower than one with more workers,
because these can only take cores from its step; a burst that says otherwise was lucky. More workers also hide the transfer
time, so the shortest receive time of any burst counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.search.contention import sampling_variance
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.values import TYPICAL_NOISE, LoaderConfig

READING_SD = 0.02
"""Relative error of a headroom that no number of batches takes away."""
NEARLY_SUFFICIENT = 0.9
"""Workers that have less headroom are no help in telling how fast more of them are."""
MOST_LOST = 0.999
"""Of the rate; a loss of all of it would have no logarithm."""
REFUTED = 3.0
"""More workers that are faster by this many standard deviations show that those that were seen to be enough are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sufficient:
    """A configuration whose workers were seen to be enough, or nearly so."""

    position: int
    log_headroom: float
    headroom_sd: float = 0.0
    """Standard deviation of that logarithm."""
    least_loss: float = 0.0
    """Share of the loop's time that is lost even where the headroom says that none is: service times vary."""
    larger: tuple[int, ...]
    """Positions of what cannot be faster: as many workers or more, and all else equal but the prefetch."""


def sufficient(
    configs: Sequence[LoaderConfig], observations: Sequence[Observation], loop_use: Sequence[float] | Floats
) -> tuple[Sufficient, ...]:
    """What the bursts show.

    Args:
        configs: the configurations.
        observations: all bursts that the twin models.
        loop_use: share of the time in which the loop of each configuration works, as the twin says.
    """
    known = _headrooms(observations)
    alike: dict[LoaderConfig, list[int]] = defaultdict(list)
    for position, config in enumerate(configs):
        if config.num_workers:
            alike[replace(config, num_workers=1, prefetch_factor=1, persistent_workers=False)].append(position)
    found = list(_deepest(configs, alike.values()))
    for group in alike.values():
        for position in group:
            workers = configs[position].num_workers
            log_headroom, sd = known.get(workers, (-math.inf, 0.0))
            larger = tuple(i for i in group if i != position and configs[i].num_workers >= workers)
            if log_headroom > math.log(NEARLY_SUFFICIENT) and larger:
                found.append(
                    Sufficient(
                        position=position,
                        log_headroom=log_headroom,
                        headroom_sd=sd,
                        least_loss=1.0 - float(loop_use[position]),
                        larger=larger,
                    )
                )
    return tuple(found)


def _deepest(configs: Sequence[LoaderConfig], groups: Iterable[Sequence[int]]) -> Iterator[Sufficient]:
    """The deepest queue of each number of workers: a shallower one cannot make them faster."""
    for group in groups:
        by_workers: dict[int, list[int]] = defaultdict(list)
        for position in group:
            by_workers[configs[position].num_workers].append(position)
        for same in by_workers.values():
            *shallower, deepest = sorted(same, key=lambda position: configs[position].prefetch_factor or 0)
            if shallower:
                yield Sufficient(position=deepest, log_headroom=math.inf, larger=tuple(shallower))


def with_sufficiency(paths: Floats, found: Sequence[Sufficient]) -> Floats:
    """The same rates, those with enough workers in each path as fast as any with more, but for what these lose.

    In each draw a sufficient configuration is raised to the larger one that is the fastest on average, less as its own rate is
    better known. Then the larger ones are capped at its rate. The same draws say how far the headroom was misread, so that
    answers repeat. Where more workers were seen to be faster beyond all luck, nothing is moved.

    Args:
        paths: logarithms of rates as they may be, shape (paths, configurations).
        found: whose workers are enough.
    """
    moved: Floats = paths.copy()
    luck = np.random.default_rng(1).standard_normal(len(paths))
    for each in found:
        own, larger = paths[:, each.position], list(each.larger)
        ahead = paths[:, larger] - own[:, None]
        if (ahead.mean(axis=0) > REFUTED * np.maximum(ahead.std(axis=0), 1e-9)).any():
            continue
        headroom = np.exp(each.log_headroom + each.headroom_sd * luck)
        lost = np.log1p(-np.clip(np.maximum(1.0 - headroom, each.least_loss), 0.0, MOST_LOST))
        unknown = min(1.0, float(own.var()) / TYPICAL_NOISE**2)
        rise = unknown * np.maximum(ahead[:, ahead.mean(axis=0).argmax()] + lost, 0.0)
        moved[:, each.position] = np.maximum(moved[:, each.position], own + rise)
        moved[:, larger] = np.minimum(moved[:, larger], (moved[:, each.position] - lost)[:, None])
    return moved


def _headrooms(observations: Sequence[Observation]) -> Mapping[int, tuple[float, float]]:
    """Logarithm of the headroom in bursts of so many workers, and its standard deviation."""
    with_workers = [seen for seen in observations if seen.num_workers]
    if not with_workers:
        return {}
    # In steps of the same burst: in seconds it would be that of the burst in which everything was quickest.
    quickest = min(float(seen.receive_s.mean()) / _step_s(seen) for seen in with_workers)
    bursts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for seen, variance in zip(with_workers, sampling_variance(with_workers), strict=True):
        loop_s = _step_s(seen) * (1.0 + quickest)
        log = math.log(seen.num_workers * loop_s / max(float(seen.service_s.mean()), 1e-12))
        own = float(variance) + float((seen.step_s / loop_s).var()) / len(seen.step_s)
        bursts[seen.num_workers].append((log, own + READING_SD**2))
    known = {}
    for workers, each in bursts.items():
        logs, variances = (np.array(values) for values in zip(*each, strict=True))
        precision = float((1 / variances).sum())
        known[workers] = (float((logs / variances).sum()) / precision, math.hypot(precision**-0.5, READING_SD))
    return known


def _step_s(seen: Observation) -> float:
    return max(float(seen.step_s.mean()), 1e-12)
