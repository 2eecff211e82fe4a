"""The twin corrected by what was measured: one joint belief about the rates of all configurations.

What the twin gets wrong is a Gaussian process over the configurations (Rasmussen and Williams 2006, algorithm 2.1):

    log rate = twin + error(configuration) + machine(round) + noise

    error     of the twin: alike for similar configurations, and for all that wait for the same step
    machine   how slow the machine was for all that was observed in one round; it cancels in every ratio within the round
    noise     of one observation; heavy-tailed, so that one disturbed observation does not decide

How large these three are is read from the observations: the likeliest of a few values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autotune_loader.twin.queue import Floats, Ints
from autotune_loader.values.config import LoaderConfig

SAFE = 0.9
"""A configuration counts as equally fast when it is within tolerance of the best with this probability."""
CHEAPNESS_SHARE = 0.2
"""Of the tolerance, what a cheaper configuration may be expected to lose against the one expected to lose least."""
TAIL_FREEDOM, REWEIGHTINGS = 4.0, 4
"""Degrees of freedom of Student's t, as which observations scatter, and turns until the weights that follow have settled."""
ERROR_SCALES = (1.0, 2.0, 4.0)
"""How many times its usual error the twin may err."""
NOISE_SDS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09)
"""Noise of an observation, relative. Quiet machines show 2 %, busy ones 8 %."""
TYPICAL_NOISE, NOISE_SPREAD = 0.03, 0.5
"""Median and log-sd of that noise before anything was measured."""
MACHINE_SDS, TYPICAL_MACHINE = (0.0, 0.02, 0.05, 0.1, 0.2), 0.04
"""How far the machine's speed may differ between rounds, and how far it usually does, relative."""
PATHS = 256
"""Drawn truths that probabilities and expected losses are counted over."""
JITTER = 1e-6
"""Added to variances so that they stay above zero: 0.1 % of a rate, far below any noise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """Observations of some configurations: one value per observation."""

    where: Ints
    """Positions of the configurations."""
    logs: Floats
    """Logarithms of the rates."""
    variances: Floats
    """Of these, by what each observation tells of itself; the noise that all have comes on top."""
    rounds: Ints
    """What was observed together has the same number."""

    def __len__(self) -> int:
        return len(self.where)

    @property
    def together(self) -> Floats:
        """1 where two observations are of one round, shape (n, n)."""
        same: Floats = (self.rounds[:, None] == self.rounds[None, :]).astype(np.float64)
        return same


@dataclass(frozen=True, kw_only=True, eq=False)
class Posterior:
    """A joint normal belief about the logarithms of some configurations' rates."""

    configs: tuple[LoaderConfig, ...]
    mean: Floats
    covariance: Floats
    noise_sd: float = TYPICAL_NOISE
    """Relative standard deviation of one further observation on its own."""

    def at(self, configs: Sequence[LoaderConfig]) -> Posterior:
        """The same belief about some of the configurations only."""
        places = {config: place for place, config in enumerate(self.configs)}
        where = [places[config] for config in configs]
        return replace(
            self, configs=tuple(configs), mean=self.mean[where], covariance=self.covariance[np.ix_(where, where)]
        )

    def after(self, seen: Seen) -> Posterior:
        """The belief after these observations; what lies far off counts less.

        Iteratively reweighted, as for errors that follow Student's t (Lange, Little and Taylor 1989).
        """
        if not len(seen):
            return self
        where, weights = seen.where, np.ones(len(seen))
        off = seen.logs - self.mean[where]
        for _ in range(REWEIGHTINGS):
            scale, noise_sd, machine_sd = _likeliest(self.covariance[np.ix_(where, where)], off, seen, weights)
            cross, machine = scale**2 * self.covariance[:, where], machine_sd**2 * seen.together
            noise = seen.variances + noise_sd**2
            within = cross[where] + machine + np.diag(noise / weights)
            explained = np.linalg.solve(within, off)
            left = off - cross[where] @ explained - machine @ explained
            weights = (TAIL_FREEDOM + 1) / (TAIL_FREEDOM + left**2 / noise)
        return replace(
            self,
            mean=self.mean + cross @ explained,
            covariance=scale**2 * self.covariance - cross @ np.linalg.solve(within, cross.T),
            noise_sd=math.hypot(noise_sd, machine_sd),
        )

    def sd(self) -> Floats:
        """Standard deviation of each logarithm."""
        deviation: Floats = np.sqrt(np.maximum(np.diag(self.covariance), JITTER))
        return deviation

    def ratio(self, index: int, other: int) -> tuple[float, float]:
        """Mean and standard deviation of ln(rate of the one / rate of the other)."""
        c = self.covariance
        variance = c[index, index] + c[other, other] - 2 * c[index, other]
        return float(self.mean[index] - self.mean[other]), math.sqrt(max(float(variance), JITTER))

    @cached_property
    def losses(self) -> Floats:
        """What each configuration loses against the best, relatively, in truths as they may be: shape (PATHS, configurations).

        Always the same draws, so that answers repeat.
        """
        root = np.linalg.cholesky(self.covariance + JITTER * np.eye(len(self.configs)))
        paths = self.mean + np.random.default_rng(0).standard_normal((PATHS, len(self.configs))) @ root.T
        losses: Floats = 1.0 - np.exp(paths - paths.max(axis=1, keepdims=True))
        return losses

    def as_fast(self, tolerance: float) -> list[int]:
        """Positions of those that count as equally fast as the best, or are expected to lose hardly more than any must."""
        loss, within = self.losses.mean(axis=0), (self.losses <= tolerance).mean(axis=0)
        eligible = (within >= SAFE) | (loss <= loss.min() + CHEAPNESS_SHARE * tolerance)
        return [int(index) for index in np.flatnonzero(eligible)]

    def choice(self, costs: Sequence[tuple[float, ...]], tolerance: float) -> tuple[int, bool]:
        """Position of the cheapest of those that count as equally fast, and whether it is safe."""
        loss, within = self.losses.mean(axis=0), (self.losses <= tolerance).mean(axis=0)
        best = min(self.as_fast(tolerance), key=lambda i: (costs[i], loss[i]))
        return best, bool(within[best] >= SAFE)

    def knowledge_gradient(self, incumbent: int) -> Floats:
        """By how much one observation of each is expected to raise the rate of what is chosen then, relatively.

        The knowledge gradient of correlated beliefs (Frazier, Powell and Dayanik 2009), against the incumbent alone.
        """
        c = self.covariance
        learnt = (np.diag(c) - c[:, incumbent]) / np.sqrt(np.diag(c) + self.noise_sd**2)
        spread = np.maximum(np.abs(learnt), 1e-9)
        z = (self.mean - self.mean[incumbent]) / spread
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
        gain: Floats = (self.mean - self.mean[incumbent]) * below + spread * density
        return gain


def _likeliest(shape: Floats, off: Floats, seen: Seen, weights: Floats) -> tuple[float, float, float]:
    """Scale of the twin's error, noise of an observation and of the machine that make the observations likeliest.

    Args:
        shape: covariance of the twin's error in the observed configurations, at scale 1.
        off: how far the observations lie off the twin.
        seen: the observations.
        weights: how much each of them counts.
    """
    options = np.array(list(itertools.product(ERROR_SCALES, NOISE_SDS, MACHINE_SDS)))
    scale, noise, machine = options.T
    squares = (each[:, None, None] ** 2 for each in (scale, noise, machine))
    parts = (shape, np.diag(1 / weights), seen.together)
    within = sum(square * part for square, part in zip(squares, parts, strict=True)) + np.diag(seen.variances / weights)
    _, determinants = np.linalg.slogdet(within)
    misfit = np.linalg.solve(within, np.broadcast_to(off[:, None], (len(options), len(off), 1)))[..., 0] @ off
    usual = np.log(scale) ** 2 + (np.log(noise / TYPICAL_NOISE) / NOISE_SPREAD) ** 2 + (machine / TYPICAL_MACHINE) ** 2
    best = options[int(np.argmin(misfit + determinants + usual))]
    return float(best[0]), float(best[1]), float(best[2])
