"""The twin corrected by what was measured: one joint belief about the rates of all configurations.

The twin's error is smooth over (workers, prefetch, threads), so it is a Gaussian process over these (Rasmussen and Williams
2006, algorithm 2.1), and measured rates pull it to the truth. What two configurations have in common cancels in their
ratio, which is what every choice is about; hence a joint belief, with all its covariances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.decision.space import UNMODELLED, Space
from autotune_loader.decision.sufficiency import Fed, raised
from autotune_loader.twin.queue import Floats, Ints
from autotune_loader.values.config import LoaderConfig

MODEL_SD = 0.06
"""Relative error that the twin's shape may have between distant configurations (its goal is a median error of 3 %)."""
LENGTH_SCALE = 1.2
"""How far apart, in doublings, configurations still share the twin's error."""
UNMODELLED_SD = 0.2
"""What a knob that the twin does not know may change, relative."""
SAFE = 0.9
"""A choice is safe when it is within tolerance of the best with this probability."""
CHEAPNESS_SHARE = 0.2
"""Of the tolerance, what a cheaper configuration may be expected to lose against the one expected to lose least."""
REFUTED = 3.0
"""More workers that are faster by this many standard deviations show that those that were seen to be enough are not."""
TAIL_FREEDOM, REWEIGHTINGS = 4.0, 4
"""Degrees of freedom of Student's t, as which rates scatter: one that something disturbed must not move everything. Without it
94.3 instead of 95.0 % of 300 simulated machines are within 2 % (studies/regret/README.md)."""
MODEL_SCALES = (1.0, 2.0, 4.0)
"""How many times `MODEL_SD` the twin may err; the bursts show which."""
NOISE_SDS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09)
"""Noise of an observation that may come out, relative. Quiet machines show 2 %, busy ones 8 %."""
TYPICAL_NOISE, NOISE_SPREAD = 0.03, 0.5
"""Median and log-sd of that noise before anything was measured."""
MACHINE_SDS, MACHINE_SPREAD = (0.01, 0.03, 0.1, 0.3), 1.0
"""How far the machine's speed may differ between rounds, relative; it usually does by the least of these."""
PATHS = 256
"""Drawn truths that probabilities and expected losses are counted over."""
JITTER = 1e-7
"""Added to variances so that they stay above zero: 0.03 % of a rate, far below any noise."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """A joint normal belief about the logarithms of some configurations' rates."""

    configs: tuple[LoaderConfig, ...]
    mean: Floats
    covariance: Floats
    noise_sd: float = TYPICAL_NOISE
    """Relative standard deviation of one further burst."""
    enough: tuple[Fed, ...] = ()
    """Whose workers suffice, so that more of them cannot be faster."""
    drawn: Floats | None = None
    """Its `paths`, where these were drawn together with those of configurations that are left out here."""

    def at(self, configs: Sequence[LoaderConfig]) -> Posterior:
        """The same belief about some of the configurations only."""
        where = [self.configs.index(config) for config in configs]
        return Posterior(
            configs=tuple(configs),
            mean=self.mean[where],
            covariance=self.covariance[np.ix_(where, where)],
            noise_sd=self.noise_sd,
            drawn=self.paths()[:, where],
        )

    def after(self, seen: Seen) -> Posterior:
        """The belief after these observations, with the twin's error, the noise and the machine's part that they show.

        Of a few values of all three the likeliest. What lies far off counts less: iteratively reweighted, as for errors
        that follow Student's t (Lange, Little and Taylor 1989).
        """
        if not len(seen.where):
            return self
        where, off = seen.where, seen.logs - self.mean[seen.where]
        shape, together = self.covariance[np.ix_(where, where)], np.equal.outer(seen.rounds, seen.rounds)

        def surprise(scale: float, noise_sd: float, machine_sd: float) -> float:
            within = scale**2 * shape + machine_sd**2 * together + np.diag(seen.variances + noise_sd**2)
            _, determinant = np.linalg.slogdet(within)
            usual = math.log(scale) ** 2 + (math.log(noise_sd / self.noise_sd) / NOISE_SPREAD) ** 2
            usual += (math.log(machine_sd / MACHINE_SDS[0]) / MACHINE_SPREAD) ** 2
            return float(off @ np.linalg.solve(within, off) + determinant + usual)

        scale, noise_sd, machine_sd = min(
            itertools.product(MODEL_SCALES, NOISE_SDS, MACHINE_SDS), key=lambda each: surprise(*each)
        )
        covariance, machine = scale**2 * self.covariance, machine_sd**2 * together
        noise, weights = seen.variances + noise_sd**2, np.ones(len(off))
        for _ in range(REWEIGHTINGS):
            explained = np.linalg.inv(covariance[np.ix_(where, where)] + machine + np.diag(noise / weights))
            error = covariance[:, where] @ explained @ off
            left = off - error[where] - machine @ explained @ off
            weights = (TAIL_FREEDOM + 1) / (TAIL_FREEDOM + left**2 / noise)
        return replace(
            self,
            mean=self.mean + error,
            covariance=covariance - covariance[:, where] @ explained @ covariance[where],
            noise_sd=math.hypot(noise_sd, machine_sd),
            drawn=None,
        )

    def sd(self) -> Floats:
        """Posterior standard deviation of each logarithm."""
        deviation: Floats = np.sqrt(np.maximum(np.diag(self.covariance), JITTER))
        return deviation

    def ratio(self, index: int, other: int) -> tuple[float, float]:
        """Mean and standard deviation of ln(rate of the one / rate of the other)."""
        c = self.covariance
        variance = c[index, index] + c[other, other] - 2 * c[index, other]
        return float(self.mean[index] - self.mean[other]), math.sqrt(max(float(variance), JITTER))

    def paths(self) -> Floats:
        """Truths as they may be, shape (PATHS, configurations); always the same draws, so that answers repeat."""
        if self.drawn is not None:
            return self.drawn
        root = np.linalg.cholesky(self.covariance + 10 * JITTER * np.eye(len(self.configs)))
        draws = self.mean + np.random.default_rng(0).standard_normal((PATHS, len(self.configs))) @ root.T
        return raised(draws, [each for each in self.enough if not self._is_refuted(each)])

    def _is_refuted(self, fed: Fed) -> bool:
        """Whether more workers were seen to be faster beyond all luck, so that these are not enough."""
        ratios = (self.ratio(other, fed.position) for other in fed.larger)
        return any(faster > REFUTED * sd for faster, sd in ratios)

    def regret_samples(self) -> Floats:
        """What each configuration loses against the best, relatively, in each of the `paths`."""
        paths = self.paths()
        regret_samples: Floats = 1.0 - np.exp(paths - paths.max(axis=1, keepdims=True))
        return regret_samples

    def as_fast(self, tolerance: float) -> list[int]:
        """Positions of those that are expected to lose hardly more than any must: what counts as equally fast."""
        short = self.regret_samples()
        loss, within = short.mean(axis=0), (short <= tolerance).mean(axis=0)
        eligible = (loss <= loss.min() + CHEAPNESS_SHARE * tolerance) | (within >= SAFE)
        return [int(index) for index in np.flatnonzero(eligible)]

    def choice(self, costs: Sequence[tuple[float, ...]], tolerance: float) -> tuple[int, bool]:
        """Position of the cheapest of those that count as equally fast, and whether it is safe."""
        short = self.regret_samples()
        loss, within = short.mean(axis=0), (short <= tolerance).mean(axis=0)
        best = min(self.as_fast(tolerance), key=lambda i: (costs[i], loss[i]))
        return best, bool(within[best] >= SAFE)

    def knowledge_gradient(self, incumbent: int) -> Floats:
        """By how much one burst of each configuration is expected to raise the rate of what is chosen then, relatively.

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


def prior_covariance(configs: Sequence[LoaderConfig], default_threads: float, space: Space) -> Floats:
    """Covariance of the twin's errors in the logarithm of the rate: similar configurations share them.

    A knob that the twin does not know changes all configurations that have it alike.

    Args:
        configs: the configurations.
        default_threads: threads of the step where `consumer_threads` does not set them.
        space: knows what such a knob is unless something else is tried.
    """
    points = _features(configs, default_threads)
    distance = ((points[:, None, :] - points[None, :, :]) / LENGTH_SCALE) ** 2
    covariance: Floats = MODEL_SD**2 * np.exp(-0.5 * distance.sum(axis=2))
    for knob in UNMODELLED:
        values = [getattr(config, knob) for config in configs]
        odd = [value != space.first_value(knob, config) for value, config in zip(values, configs, strict=True)]
        if any(odd):
            same = np.array([[one == other for other in values] for one in values])
            covariance += UNMODELLED_SD**2 * np.outer(odd, odd) * same
    return covariance


def _features(configs: Sequence[LoaderConfig], default_threads: float) -> Floats:
    """Coordinates in doublings: what doubles a knob moves a configuration by one."""
    return np.array(
        [
            (
                math.log2(config.num_workers + 0.5),
                0.5 * math.log2(config.prefetch_factor or 1),
                math.log2(config.consumer_threads or max(default_threads, 1.0)),
                2.0 * config.pin_memory + config.device_prefetch,
            )
            for config in configs
        ]
    )
