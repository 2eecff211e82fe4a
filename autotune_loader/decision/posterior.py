"""The twin corrected by what was measured: one joint belief about the rates of all configurations.

The twin's error is smooth over (workers, prefetch, threads), so it is a Gaussian process over these (Rasmussen and Williams
2006, algorithm 2.1), and measured rates pull it to the truth. What two configurations have in common cancels in their
ratio, which is what every choice is about; hence a joint belief, with all its covariances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune_loader.decision.sufficiency import Sufficiency
from autotune_loader.twin.queue import Floats
from autotune_loader.values.config import LoaderConfig

MODEL_SD = 0.06
"""Relative error that the twin's shape may have between distant configurations (its goal is a median error of 3 %)."""
LENGTH_SCALE = 1.2
"""How far apart, in doublings, configurations still share the twin's error."""
UNMODELLED_SD = 0.1
"""Relative error of a single burst of a configuration that the twin knows nothing of."""
SAFE = 0.9
"""A choice is safe when it is within tolerance of the best with this probability."""
CHEAPNESS_SHARE = 0.2
"""Of the tolerance, what a cheaper configuration may be expected to lose against the one expected to lose least."""
REFUTED = 3.0
"""More workers that are faster by this many standard deviations show that those that were seen to be enough are not."""
DEPTH_REFUTED = 1.5
"""A shallow queue that is faster than a deeper one by this many shows that this one slows the workers, as large batches do. It
takes less than `REFUTED`, because a deeper queue hardly ever gains much."""
TAIL_FREEDOM, REWEIGHTINGS = 4.0, 4
"""Degrees of freedom of Student's t, as which rates scatter: one that something disturbed must not move everything. Without it
94.3 instead of 95.0 % of 300 simulated machines are within 2 % (studies/regret/README.md)."""
MODEL_SCALES = (1.0, 2.0, 4.0)
"""How many times `MODEL_SD` the twin may err; the bursts show which."""
NOISE_SDS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08)
"""Noise between bursts of one configuration that may come out. Quiet machines show 2 %, busy ones 8 %."""
TYPICAL_NOISE, NOISE_SPREAD = 0.03, 0.5
"""Median and log-sd of that noise before anything was measured."""
PATHS = 256
"""Drawn truths that probabilities and expected losses are counted over."""
JITTER = 1e-7
"""Added to variances so that they stay above zero: 0.03 % of a rate, far below any noise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """A joint normal belief about the logarithms of some configurations' rates."""

    configs: tuple[LoaderConfig, ...]
    mean: Floats
    covariance: Floats
    noise_sd: float = TYPICAL_NOISE
    """Relative standard deviation of one further burst."""
    drawn: Floats | None = None
    """Draws of the logarithms, where they were made together with those of configurations that are left out here."""
    sufficient: Floats | None = None
    """And what these owe to configurations with more workers, as `Sufficiency.floor` says."""
    sufficiency: Sufficiency | None = None
    """Which workers suffice, so that more of them cannot be faster."""

    def at(self, configs: Sequence[LoaderConfig]) -> Posterior:
        """The same belief about some of the configurations only."""
        where = [self.configs.index(config) for config in configs]
        draws = self._draws()
        return Posterior(
            configs=tuple(configs),
            mean=self.mean[where],
            covariance=self.covariance[np.ix_(where, where)],
            noise_sd=self.noise_sd,
            drawn=draws[:, where],
            sufficient=self._sufficient_floor(draws)[:, where],
            sufficiency=self.sufficiency.at(where) if self.sufficiency is not None else None,
        )

    def including(self, rates: Mapping[LoaderConfig, float]) -> Posterior:
        """The same belief, and of the configurations that it does not know what one burst said."""
        new = [config for config in rates if config not in self.configs]
        known, size = len(self.configs), len(self.configs) + len(new)
        covariance = np.zeros((size, size))
        covariance[:known, :known] = self.covariance
        covariance[range(known, size), range(known, size)] = UNMODELLED_SD**2
        return Posterior(
            configs=(*self.configs, *new),
            mean=np.concatenate([self.mean, np.log([rates[config] for config in new])]),
            covariance=covariance,
            noise_sd=self.noise_sd,
            sufficiency=self.sufficiency.extended(len(new)) if self.sufficiency is not None else None,
        )

    def updated(self, seen: Sequence[int], logs: Sequence[float], variances: Sequence[float]) -> Posterior:
        """The belief after bursts of the configurations at these positions; what lies far off counts less.

        Iteratively reweighted, as for errors that follow Student's t (Lange, Little and Taylor 1989).

        Args:
            seen: positions in `configs`, one per burst.
            logs: logarithms of the measured rates.
            variances: of these logarithms.
        """
        if not seen:
            return self
        where, values, noise = np.array(seen), np.array(logs), np.array(variances)
        mean, cross, weights = self.mean, self.covariance[:, where], np.ones(len(values))
        for _ in range(REWEIGHTINGS):
            within = self.covariance[np.ix_(where, where)] + np.diag(noise / weights)
            gain = np.linalg.solve(within, cross.T).T
            mean = self.mean + gain @ (values - self.mean[where])
            weights = (TAIL_FREEDOM + 1) / (TAIL_FREEDOM + (values - mean[where]) ** 2 / noise)
        return replace(self, mean=mean, covariance=self.covariance - gain @ cross.T, drawn=None, sufficient=None)

    def after(self, seen: Sequence[int], logs: Sequence[float], variances: Sequence[float]) -> Posterior:
        """The belief after bursts, as `updated`, with the twin's error and the noise between bursts that they show.

        A wrong twin must be seen to be wrong. Of a few values of both the likeliest.

        Args:
            seen: positions in `configs`, one per burst.
            logs: logarithms of the measured rates.
            variances: of these logarithms, by what each burst tells of itself.
        """
        if not seen:
            return self
        where, own = np.array(seen), np.array(variances)
        off, shape = np.array(logs) - self.mean[where], self.covariance[np.ix_(where, where)]

        def surprise(scale: float, noise_sd: float) -> float:
            within = scale**2 * shape + np.diag(own + noise_sd**2)
            _, determinant = np.linalg.slogdet(within)
            usual = math.log(scale) ** 2 + (math.log(noise_sd / TYPICAL_NOISE) / NOISE_SPREAD) ** 2
            return float(off @ np.linalg.solve(within, off) + determinant + usual)

        scale, noise_sd = min(itertools.product(MODEL_SCALES, NOISE_SDS), key=lambda each: surprise(*each))
        shown = replace(self, covariance=scale**2 * self.covariance, noise_sd=noise_sd)
        return shown.updated(seen, logs, [each + noise_sd**2 for each in variances])

    def sd(self) -> Floats:
        """Posterior standard deviation of each logarithm."""
        deviation: Floats = np.sqrt(np.maximum(np.diag(self.covariance), JITTER))
        return deviation

    def ratio(self, index: int, other: int) -> tuple[float, float]:
        """Mean and standard deviation of ln(rate of the one / rate of the other)."""
        means, deviations = self._ratios_to(other)
        return float(means[index]), float(deviations[index])

    def _ratios_to(self, other: int) -> tuple[Floats, Floats]:
        """The same of every configuration against one."""
        c = self.covariance
        variances = np.diag(c) + c[other, other] - 2 * c[:, other]
        return self.mean - self.mean[other], np.sqrt(np.maximum(variances, JITTER))

    def paths(self) -> Floats:
        """Truths as they may be, shape (PATHS, configurations); always the same draws, so that answers repeat."""
        draws = self._draws()
        paths = draws.copy()
        for group in self._by_depth():
            if self._is_slowed_by_depth(group):
                continue
            for shallow, deep in itertools.pairwise(group):
                # Otherwise a deeper queue is never slower: whatever is true of the shallow one holds for it too.
                paths[:, deep] = np.maximum(paths[:, deep], paths[:, shallow])
        raised: Floats = np.maximum(paths, self._sufficient_floor(draws))
        return raised

    def _draws(self) -> Floats:
        if self.drawn is not None:
            return self.drawn
        root = np.linalg.cholesky(self.covariance + 10 * JITTER * np.eye(len(self.configs)))
        draws: Floats = self.mean + np.random.default_rng(0).standard_normal((PATHS, len(self.configs))) @ root.T
        return draws

    def _sufficient_floor(self, draws: Floats) -> Floats:
        """What each is at least because its workers were seen to be enough, unless its rate denies it beyond all luck."""
        if self.sufficient is not None:
            return self.sufficient
        if self.sufficiency is None:
            return np.full_like(draws, -np.inf)
        larger = self.sufficiency.larger
        sufficient = [
            each for each in self.sufficiency.sufficient() if not self._refuting(each)[list(larger[each])].any()
        ]
        return self.sufficiency.floor(draws, sufficient)

    def _refuting(self, index: int, sds: float = REFUTED) -> NDArray[np.bool_]:
        """Which configurations are faster than one by this many standard deviations; by default beyond all luck."""
        faster, deviations = self._ratios_to(index)
        refuting: NDArray[np.bool_] = faster > sds * deviations
        return refuting

    def is_as_fast(self, index: int, other: int, tolerance: float) -> bool:
        """Whether it was seen that the workers at `index` are enough, so that `other`, which has more, is not faster."""
        if self.sufficiency is None or self._refuting(index)[other]:
            return False
        return self.sufficiency.is_as_fast(index, other, tolerance)

    def _by_depth(self) -> list[list[int]]:
        """Positions of the configurations that differ in prefetch alone, the shallow before the deep."""
        groups: dict[LoaderConfig, list[int]] = {}
        for index, config in enumerate(self.configs):
            if config.prefetch_factor is not None:
                groups.setdefault(replace(config, prefetch_factor=1), []).append(index)
        return [sorted(group, key=lambda index: self.configs[index].prefetch_factor or 0) for group in groups.values()]

    def _is_slowed_by_depth(self, group: list[int]) -> bool:
        """Whether a shallow queue of these was seen to be so much faster than a deeper one that this one slows the workers."""
        return any(
            self._refuting(deep, DEPTH_REFUTED)[group[:place]].any() for place, deep in enumerate(group) if place
        )

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


def prior_covariance(configs: Sequence[LoaderConfig], default_threads: float) -> Floats:
    """Covariance of the twin's errors in the logarithm of the rate: similar configurations share them.

    Args:
        configs: the configurations.
        default_threads: threads of the step where `consumer_threads` does not set them.
    """
    points = _features(configs, default_threads)
    distance = ((points[:, None, :] - points[None, :, :]) / LENGTH_SCALE) ** 2
    covariance: Floats = MODEL_SD**2 * np.exp(-0.5 * distance.sum(axis=2))
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
                math.log2(config.batch_size or 1),
            )
            for config in configs
        ]
    )
