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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """How large the three parts are, each an array with one value per alternative."""

    error: Floats
    noise: Floats
    machine: Floats

    def __getitem__(self, index: int) -> Scales:
        only = slice(index, index + 1)
        return Scales(error=self.error[only], noise=self.noise[only], machine=self.machine[only])


_GRID = np.array(list(itertools.product(ERROR_SCALES, NOISE_SDS, MACHINE_SDS)))
ALTERNATIVES = Scales(error=_GRID[:, 0], noise=_GRID[:, 1], machine=_GRID[:, 2])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Told:
    """What observations tell of each observed configuration, with the machine's part in every round averaged out.

    Arrays are of (alternatives, configurations, ...): it takes as long for many rounds as for few.
    """

    information: Floats
    """Precision matrix of the observed configurations' errors, by the observations alone."""
    pull: Floats
    """That matrix times the errors which the observations show."""
    surprise: Floats
    """Twice the negative log-likelihood of the observations if the twin were right."""
    precision: Floats
    """Of each observation, shape (alternatives, observations)."""
    damping: Floats
    """Of each round: its machine effect over the sum of what is left in it, weighted by precision."""


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
        places, columns = np.unique(seen.where, return_inverse=True)
        of_config = np.eye(len(places))[columns]
        rounds, numbers = np.unique(seen.rounds, return_inverse=True)
        of_round = np.eye(len(rounds))[numbers]
        shape, off, weights = (
            self.covariance[np.ix_(places, places)],
            seen.logs - self.mean[seen.where],
            np.ones(len(seen)),
        )
        for _ in range(REWEIGHTINGS):
            alternatives = _tell(ALTERNATIVES, seen.variances, weights, off, of_config, of_round)
            scales = ALTERNATIVES[_likeliest(ALTERNATIVES, alternatives, shape)]
            told = _tell(scales, seen.variances, weights, off, of_config, of_round)
            variance = float(scales.error[0]) ** 2
            gain = (
                variance
                * self.covariance[:, places]
                @ np.linalg.inv(np.eye(len(places)) + variance * told.information[0] @ shape)
            )
            error = gain @ told.pull[0]
            left = off - error[seen.where]
            left = left - of_round @ (told.damping[0] * ((told.precision[0] * left) @ of_round))
            weights = (TAIL_FREEDOM + 1) / (TAIL_FREEDOM + left**2 / (seen.variances + scales.noise[0] ** 2))
        covariance = variance * (self.covariance - gain @ told.information[0] @ self.covariance[places])
        return replace(
            self,
            mean=self.mean + error,
            covariance=(covariance + covariance.T) / 2,
            noise_sd=math.hypot(float(scales.noise[0]), float(scales.machine[0])),
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


def _tell(
    scales: Scales, variances: Floats, weights: Floats, off: Floats, of_config: Floats, of_round: Floats
) -> _Told:
    """What observations tell under each alternative.

    Args:
        scales: the alternatives.
        variances: of the observations, by what each tells of itself.
        weights: how much each of them counts.
        off: how far they lie off the twin.
        of_config: 1 where an observation (row) is of a configuration (column).
        of_round: the same of rounds.
    """
    precision = weights / (variances + scales.noise[:, None] ** 2)
    in_round, pulled = precision @ of_round, precision * off
    damping = scales.machine[:, None] ** 2 / (1 + scales.machine[:, None] ** 2 * in_round)
    shared = of_config.T @ (precision[:, :, None] * of_round)
    lost = shared * damping[:, None, :]
    own = (precision @ of_config)[:, :, None] * np.eye(of_config.shape[1])
    return _Told(
        information=own - lost @ shared.transpose(0, 2, 1),
        pull=pulled @ of_config - (lost @ (pulled @ of_round)[:, :, None])[:, :, 0],
        surprise=(pulled * off - np.log(precision)).sum(axis=1)
        + (np.log1p(scales.machine[:, None] ** 2 * in_round) - damping * (pulled @ of_round) ** 2).sum(axis=1),
        precision=precision,
        damping=damping,
    )


def _likeliest(scales: Scales, told: _Told, shape: Floats) -> int:
    """Which alternative makes the observations likeliest.

    Args:
        scales: the alternatives.
        told: what the observations tell under each.
        shape: covariance of the twin's error in the observed configurations, at scale 1.
    """
    variance = scales.error[:, None, None] ** 2
    within = np.eye(len(shape)) + variance * told.information @ shape
    _, determinants = np.linalg.slogdet(within)
    explained = (variance * shape @ np.linalg.solve(within, told.pull[:, :, None]))[:, :, 0]
    misfit = told.surprise - (told.pull * explained).sum(axis=1)
    usual = np.log(scales.error) ** 2 + (np.log(scales.noise / TYPICAL_NOISE) / NOISE_SPREAD) ** 2
    return int(np.argmin(misfit + determinants + usual + (scales.machine / TYPICAL_MACHINE) ** 2))
