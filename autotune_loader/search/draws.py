"""Rates as they may be: draws from what is believed beforehand and what was observed; and of workers that are enough.

    ln(rate observed) = truth of the configuration + what its round had in common + noise

How far beliefs may err, how noisy a burst is and how much rounds differ is averaged over a grid, each by how likely the
observations are under it. Everything that is decided is counted over the same draws.

Adding workers cannot make a configuration faster whose workers keep the step busy, they can only take cores from the step: a
burst that says otherwise was lucky. Within one burst workers and loop have the same machine, so the headroom
workers x (receipt + step) / service hardly depends on what else the machine does, as the rates of two bursts do.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.search.observation import BURST_SD, Observation, sampling_variance
from autotune_loader.search.queue import Floats, Ints
from autotune_loader.values import LoaderConfig
from autotune_loader.values.statistics import TYPICAL_NOISE

PATHS = 1024  # draws: a probability of 0.95 is known to 0.7 points
ERROR_SCALES = (1.0, 2.0, 4.0)  # how many times as far as expected beliefs may err beforehand; the bursts show which
NOISE_SDS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09, 0.13, 0.2, 0.3)
"""Relative noise of a burst that may come out. Quiet machines show 2%, busy ones 8%, and some 30%."""
NOISE_SPREAD = 0.8  # log-sd of that noise around the typical one before anything was measured
ROUND_SDS = (0.01, 0.03, 0.1, 0.3)
"""How far the machine's speed may differ between rounds, relative; it usually does by the least of these."""
TAIL_FREEDOM, REWEIGHTINGS = 4.0, 4
"""Degrees of freedom of Student's t, as which rates scatter: one that something disturbed must not move everything. With normal
noise 92.5 instead of 94.0% of choices are near the best (studies/regret/README.md)."""
LEAST_WEIGHT = 0.01  # points of the grid that are this unlikely are left out
JITTER = 1e-6  # added to variances so that they stay above zero: 0.1% of a rate, far below any noise
SURE = 0.9  # a configuration counts as equally fast when it is so with this probability
LIKELY = 0.5  # a probability below this tells little: then what is expected to lose the least counts
NEAR_BEST = 0.1  # share of the tolerance by which expected losses may differ, and the cheapest is taken
NEARLY_SUFFICIENT = 0.9  # workers that have less headroom do not tell how fast more of them are
MOST_LOST = 0.999  # of the rate; a loss of all of it would have no logarithm
REFUTED = 3.0  # standard deviations by which more workers are faster, so that those seen to be enough are not


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """Observations: one value each."""

    where: Ints  # positions of what was observed
    logs: Floats  # logarithms of the rates
    variances: Floats  # of these, by what each observation tells of itself; the noise that all have comes on top
    rounds: Ints  # what was observed together has the same number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """Logarithms of rates as they may be."""

    keys: tuple[Hashable, ...]
    paths: Floats  # shape (PATHS, keys)

    def of(self, keys: Sequence[Hashable]) -> Draws:
        """The same draws of some of the keys only."""
        where = [self.keys.index(key) for key in keys]
        return replace(self, keys=tuple(keys), paths=self.paths[:, where])

    @property
    def losses(self) -> Floats:
        """What each loses against the best, relatively, in each draw."""
        losses: Floats = 1.0 - np.exp(self.paths - self.paths.max(axis=1, keepdims=True))
        return losses

    def within(self, tolerance: float) -> Floats:
        """Probability of each that it loses no more than the tolerance."""
        within: Floats = (self.losses <= tolerance).mean(axis=0)
        return within


def draw(keys: Sequence[Hashable], mean: Floats, covariance: Floats, seen: Observed) -> Draws:
    """Draws of the truths after these observations; always the same ones, so that answers repeat.

    Each is a draw of what is believed beforehand, by the mean and covariance of the logarithms, corrected by what the
    observations say beyond it (Matheron's rule).
    """
    rng, count = np.random.default_rng(0), len(seen.where)
    root = np.linalg.cholesky(covariance + JITTER * np.eye(len(keys)))
    errors = rng.standard_normal((PATHS, len(keys))) @ root.T
    if not count:
        return Draws(keys=tuple(keys), paths=mean + errors)
    shape, off = covariance[np.ix_(seen.where, seen.where)], seen.logs - mean[seen.where]
    luck, common = rng.standard_normal((PATHS, count)), rng.standard_normal((PATHS, int(seen.rounds.max()) + 1))
    scales, noise_sds, round_sds = (axis.ravel() for axis in np.meshgrid(ERROR_SCALES, NOISE_SDS, ROUND_SDS))
    noises, explained, surprise = _fitted(scales, noise_sds, round_sds, seen, shape, off)
    shares = np.exp(-0.5 * (surprise - surprise.min()))
    shares = np.where(shares >= LEAST_WEIGHT * shares.max(), shares, 0.0)
    ends = np.round(np.cumsum(shares / shares.sum()) * PATHS).astype(int)
    paths = np.empty_like(errors)
    for point, (begun, ended) in enumerate(itertools.pairwise([0, *ends])):
        taken, scale = slice(begun, ended), scales[point]
        error = scale * errors[taken]
        said = error[:, seen.where] + round_sds[point] * common[taken][:, seen.rounds]
        said += np.sqrt(noises[point]) * luck[taken]
        gain = scale**2 * covariance[:, seen.where] @ explained[point]
        paths[taken] = mean + error + (off - said) @ gain.T
    return Draws(keys=tuple(keys), paths=paths)


def _fitted(
    scales: Floats, noise_sds: Floats, round_sds: Floats, seen: Observed, shape: Floats, off: Floats
) -> tuple[Floats, Floats, Floats]:
    """Variance of each observation, the inverse of their covariance, and how unlikely they are, at each point of the grid.

    Noise follows Student's t, by iterative reweighting (Lange, Little and Taylor 1989), so that something that disturbed one
    burst makes neither noise nor rounds look wilder than they are.
    """
    together = np.equal.outer(seen.rounds, seen.rounds).astype(np.float64)
    within = scales[:, None, None] ** 2 * shape + round_sds[:, None, None] ** 2 * together
    noise, unit = seen.variances + noise_sds[:, None] ** 2, np.eye(len(off))
    weights = np.ones_like(noise)
    for _ in range(REWEIGHTINGS):
        left = off - within @ np.linalg.inv(within + (noise / weights)[:, :, None] * unit) @ off
        weights = (TAIL_FREEDOM + 1) / (TAIL_FREEDOM + left**2 / noise)
    spread = within + (noise / weights)[:, :, None] * unit
    explained = np.linalg.inv(spread).astype(np.float64)
    surprise: Floats = np.linalg.slogdet(spread)[1] + explained @ off @ off
    surprise += TAIL_FREEDOM * (weights - 1 - np.log(weights)).sum(axis=1)
    surprise += np.log(scales) ** 2 + (np.log(noise_sds / TYPICAL_NOISE) / NOISE_SPREAD) ** 2
    surprise += np.log(round_sds / ROUND_SDS[0]) ** 2
    return noise / weights, explained, surprise


def equally_fast(draws: Draws, tolerance: float) -> list[int]:
    """Positions of those that count as equally fast: within the tolerance of the best almost surely, or as surely as any.

    While no such probability tells much, those that are expected to lose the least.
    """
    within = draws.within(tolerance)
    if within.max() < LIKELY:
        losses = draws.losses.mean(axis=0)
        return [int(index) for index in np.flatnonzero(losses <= losses.min() + NEAR_BEST * tolerance)]
    return [int(index) for index in np.flatnonzero(within >= min(SURE, float(within.max())))]


def choose(draws: Draws, costs: Sequence[tuple[float, ...]], tolerance: float) -> int:
    """Position of the cheapest of those that count as equally fast."""
    losses = draws.losses.mean(axis=0)
    return min(equally_fast(draws, tolerance), key=lambda i: (costs[i], losses[i]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sufficient:
    """A configuration whose workers were seen to be enough, or nearly so."""

    position: int
    log_headroom: float
    headroom_sd: float = 0.0  # standard deviation of that logarithm
    least_loss: float = 0.0
    """Share of the loop's time that is lost even where the headroom says that none is: service times vary."""
    larger: tuple[int, ...]
    """Positions of what cannot be faster: as many workers or more, and all else equal but the prefetch."""


def sufficient(
    configs: Sequence[LoaderConfig],
    observations: Sequence[Observation],
    loop_use: Sequence[float] | Floats,
    is_modelled: Callable[[LoaderConfig], bool] = lambda config: True,
) -> list[Sufficient]:
    """What the bursts show, and the share of the time in which the loop of each configuration works, as the twin says.

    They tell of configurations that differ from theirs in workers and prefetch alone, which those are that it models.
    """
    same_workers, alike = defaultdict[LoaderConfig, list[int]](list), defaultdict[LoaderConfig, list[int]](list)
    for position, config in enumerate(configs):
        if config.num_workers:
            same_workers[replace(config, prefetch_factor=1)].append(position)
            alike[replace(config, num_workers=1, prefetch_factor=1)].append(position)
    found = []
    for group in same_workers.values():  # a shallower queue cannot make the same workers faster
        *shallower, deepest = sorted(group, key=lambda position: configs[position].prefetch_factor or 0)
        if shallower:
            found.append(Sufficient(position=deepest, log_headroom=math.inf, larger=tuple(shallower)))
    known = _headrooms(observations)
    for group in alike.values():
        for position in group if is_modelled(configs[group[0]]) else ():
            workers = configs[position].num_workers
            log_headroom, sd = known.get(workers, (-math.inf, 0.0))
            larger = tuple(i for i in group if i != position and configs[i].num_workers >= workers)
            if log_headroom > math.log(NEARLY_SUFFICIENT) and larger:
                kept = {"log_headroom": log_headroom, "headroom_sd": sd, "least_loss": 1.0 - float(loop_use[position])}
                found.append(Sufficient(position=position, larger=larger, **kept))
    return found


def with_sufficiency(paths: Floats, found: Sequence[Sufficient]) -> Floats:
    """The same rates, those with enough workers in each path as fast as any with more, but for what these lose.

    In each draw a sufficient configuration is raised to the larger one that is the fastest on average, less as its own rate is
    better known. Then the larger ones are capped at its rate. The same draws say how far the headroom was misread, so that
    answers repeat. Where more workers were seen to be faster beyond all luck, nothing is moved.
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
    seen = [(each, max(float(each.step_s.mean()), 1e-12)) for each in observations if each.num_workers]
    if not seen:
        return {}
    # More workers also hide the transfer, so the shortest receipt of any burst counts: in steps of the same burst, as in
    # seconds it would be that of the burst in which everything was quickest.
    quickest = min(float(each.receive_s.mean()) / step_s for each, step_s in seen)
    bursts = defaultdict[int, list[tuple[float, float]]](list)
    for (each, step_s), variance in zip(seen, sampling_variance([each for each, _ in seen]), strict=True):
        loop_s = max(step_s * (1.0 + quickest), each.pin_s)
        log = math.log(each.num_workers * loop_s / max(float(each.service_s.mean()), 1e-12))
        own = float(variance) + float((each.step_s / loop_s).var()) / len(each.step_s)
        bursts[each.num_workers].append((log, own + BURST_SD**2))
    known = {}
    for workers, values in bursts.items():
        logs, variances = np.array(values).T
        precision = float((1 / variances).sum())
        known[workers] = (float((logs / variances).sum()) / precision, math.hypot(precision**-0.5, BURST_SD))
    return known
