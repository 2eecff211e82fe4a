"""Truths as they may be: draws of the rates of some things, from what is believed beforehand and what was observed.

    ln(rate observed) = truth of the thing + what its round had in common + noise

How far beliefs may err, how noisy a burst is and how much rounds differ is averaged over a grid, each by how likely the
observations are under it. Everything that is decided is counted over the same draws: what is chosen, how surely, who is its
rival, and what one more pair of both would add to that certainty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.search.queue import Floats, Ints
from autotune_loader.values import TYPICAL_NOISE

PATHS = 1024
"""Draws: a probability of 0.95 is known to 0.7 points."""
ERROR_SCALES = (1.0, 2.0, 4.0)
"""How many times as far as expected beliefs may err beforehand; the bursts show which."""
NOISE_SDS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09, 0.13, 0.2, 0.3)
"""Noise of a burst that may come out, relative. Quiet machines show 2%, busy ones 8%, and some 30%."""
NOISE_SPREAD = 0.8
"""Log-sd of that noise around the typical one before anything was measured."""
ROUND_SDS, ROUND_SPREAD = (0.01, 0.03, 0.1, 0.3), 1.0
"""How far the machine's speed may differ between rounds, relative; it usually does by the least of these."""
TAIL_FREEDOM, REWEIGHTINGS = 4.0, 4
"""Degrees of freedom of Student's t, as which rates scatter: one that something disturbed must not move everything."""
LEAST_WEIGHT = 0.01
"""Points of the grid that are this unlikely are left out."""
JITTER = 1e-6
"""Added to variances so that they stay above zero: 0.1% of a rate, far below any noise."""
OUTCOMES = 96
"""Outcomes of a further pair that are imagined to tell what it is worth."""
AHEAD = (1, 2, 4)
"""Pairs that are imagined at once: where one cannot change the choice, some may."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """Observations: one value each."""

    where: Ints
    """Positions of what was observed."""
    logs: Floats
    """Logarithms of the rates."""
    variances: Floats
    """Of these, by what each observation tells of itself; the noise that all have comes on top."""
    rounds: Ints
    """What was observed together has the same number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """Logarithms of rates as they may be."""

    keys: tuple[Hashable, ...]
    paths: Floats
    """Shape (PATHS, keys)."""
    noise_sd: float
    """Relative standard deviation of one further burst beside others of its round."""

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

    def worth_of_pair(self, one: int, other: int, tolerance: float) -> float:
        """By how much one more pair of these raises the probability that the best choice loses no more than the tolerance.

        Outcomes are imagined by the draws themselves, and each is believed as far as its noise allows.
        """
        inside = (self.losses <= tolerance).astype(np.float64)
        known, logs = inside.mean(axis=0).max(), self.paths[:, one] - self.paths[:, other]
        worth = 0.0
        normal = np.random.default_rng(2).standard_normal(OUTCOMES)
        truths = logs[:: max(1, len(logs) // OUTCOMES)][:OUTCOMES]
        for pairs in AHEAD:
            sd = self.noise_sd * math.sqrt(2 / pairs)
            off = (truths + sd * normal[: len(truths)])[:, None] - logs[None, :]
            weights = np.exp(-0.5 * (off / sd) ** 2)
            weights /= weights.sum(axis=1, keepdims=True)
            worth = max(worth, (float((weights @ inside).max(axis=1).mean()) - known) / pairs)
        return worth


def draw(keys: Sequence[Hashable], mean: Floats, covariance: Floats, seen: Observed) -> Draws:
    """Draws of the truths after these observations; always the same ones, so that answers repeat.

    Each is a draw of what is believed beforehand, corrected by what the observations say beyond it (Matheron's rule).

    Args:
        keys: what the rates are of.
        mean: of the logarithms before the observations.
        covariance: of the same.
        seen: what was observed; may be nothing.
    """
    rng, count = np.random.default_rng(0), len(seen.where)
    root = np.linalg.cholesky(covariance + JITTER * np.eye(len(keys)))
    errors = rng.standard_normal((PATHS, len(keys))) @ root.T
    if not count:
        return Draws(keys=tuple(keys), paths=mean + errors, noise_sd=TYPICAL_NOISE)
    together = np.equal.outer(seen.rounds, seen.rounds).astype(np.float64)
    shape, off = covariance[np.ix_(seen.where, seen.where)], seen.logs - mean[seen.where]
    luck, common = rng.standard_normal((PATHS, count)), rng.standard_normal((PATHS, int(seen.rounds.max()) + 1))
    scales, noise_sds, round_sds = (axis.ravel() for axis in np.meshgrid(ERROR_SCALES, NOISE_SDS, ROUND_SDS))
    noises, explained, surprise = _fitted(scales, noise_sds, round_sds, seen, shape, together, off)
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
    return Draws(keys=tuple(keys), paths=paths, noise_sd=float(noise_sds @ np.diff(ends, prepend=0)) / PATHS)


def _fitted(
    scales: Floats, noise_sds: Floats, round_sds: Floats, seen: Observed, shape: Floats, together: Floats, off: Floats
) -> tuple[Floats, Floats, Floats]:
    """Variance of each observation, the inverse of their covariance, and how unlikely they are, at each point of the grid.

    Noise follows Student's t: reweighted by turns (Lange, Little and Taylor 1989), so that something that disturbed one burst
    makes neither noise nor rounds look wilder than they are.
    """
    within = scales[:, None, None] ** 2 * shape + round_sds[:, None, None] ** 2 * together
    noise = seen.variances + noise_sds[:, None] ** 2
    weights = np.ones_like(noise)
    for _ in range(REWEIGHTINGS):
        left = off - within @ np.linalg.inv(within + _diagonal(noise / weights)) @ off
        weights = (TAIL_FREEDOM + 1) / (TAIL_FREEDOM + left**2 / noise)
    spread = within + _diagonal(noise / weights)
    explained = np.linalg.inv(spread).astype(np.float64)
    surprise: Floats = np.linalg.slogdet(spread)[1] + explained @ off @ off
    surprise += TAIL_FREEDOM * (weights - 1 - np.log(weights)).sum(axis=1)
    surprise += np.log(scales) ** 2 + (np.log(noise_sds / TYPICAL_NOISE) / NOISE_SPREAD) ** 2
    surprise += (np.log(round_sds / ROUND_SDS[0]) / ROUND_SPREAD) ** 2
    return noise / weights, explained, surprise


def _diagonal(variances: Floats) -> Floats:
    diagonal: Floats = variances[:, :, None] * np.eye(variances.shape[1])
    return diagonal
