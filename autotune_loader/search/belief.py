"""What the bursts so far say of every configuration: one belief, whose draws answer every question.

    trials ──► twin (queues and cores) ──► rates expected ──► Gaussian process, corrected by every rate ──► draws

The twin knows queues and cores; the Gaussian process over (workers, prefetch) and the knobs that the twin does not know takes
up what it gets wrong (Rasmussen and Williams 2006, algorithm 2.1). Where there are rates but no traces, as in a study of a
user's own objective, the process begins from nothing. No clock, no Optuna, no process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np

from autotune_loader.search.draws import Draws, Observed, draw
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.search.space import UNMODELLED, Context, Space
from autotune_loader.search.sufficiency import sufficient, with_sufficiency
from autotune_loader.search.twin import Solved, Twin
from autotune_loader.values import Z_95, LoaderConfig, Trial

MODEL_SD = 0.06
"""Relative error that the twin's shape may have between distant configurations (its goal is a median error of 3 %)."""
LEVEL_SD = 0.1
"""And its level: all bursts may have been slow together."""
UNKNOWN_SD = 0.7
"""Without a twin anything may be twice as fast as anything else."""
LENGTH_SCALE = 1.2
"""How far apart, in doublings, configurations still share the twin's error."""
UNMODELLED_SD = 0.1
"""What a knob that the twin does not know may change, relative."""
SAFE = 0.9
"""A choice is safe when it is within the tolerance of the best with this probability."""
ALIKE = 0.05
"""Of configurations whose probability of being within the tolerance differs by no more than this, the cheapest is chosen."""
WORTHWHILE = 0.4
"""A burst must be expected to gain more than this share of the tolerance."""
FURTHER = 0.1
"""A further finalist must be expected to save this share of the tolerance; the cheapest of those that save as much is taken."""
POOREST_BURST_SD = 0.2
"""Relative standard deviation of a burst whose few batches give no better interval."""


class Belief:
    """What some trials say of every configuration of a space.

    Args:
        space: what is legal.
        context: cores and step.
        trials: all that was measured: bursts of the search and of rounds alike.
        tolerance: relative difference that counts as equally fast.
    """

    def __init__(self, space: Space, context: Context, trials: Sequence[Trial], *, tolerance: float = 0.02) -> None:
        self.space, self.context, self.tolerance = space, context, tolerance
        self.trials = tuple(trials)
        self._seen = [trial for trial in trials if trial.log_rate is not None]

    @cached_property
    def twin(self) -> Twin | None:
        """The queueing model of all bursts whose stages were measured; None before there is any."""
        measured = [(t.config, t.measurement) for t in self._seen if t.measurement is not None]
        known = [(config, m) for config, m in measured if m.step_s + m.service_s > 0 and self.space.is_modelled(config)]
        return Twin.fit([Observation.of(config, m) for config, m in known], self.context) if known else None

    @cached_property
    def draws(self) -> Draws:
        """Rates as they may be, of every legal configuration and every one that was observed."""
        configs = self._configs()
        solved = None if self.twin is None else self.twin.predict(configs)
        prior = draw(
            configs, self._mean(configs, solved), _covariance(configs, self.space, solved), self._observed(configs)
        )
        if self.twin is None or solved is None:
            return prior
        found = sufficient(configs, self.twin.observations, solved.loop_use)
        return Draws(keys=prior.keys, paths=with_sufficiency(prior.paths, found), noise_sd=prior.noise_sd)

    @property
    def configs(self) -> tuple[LoaderConfig, ...]:
        """Those that the draws are of, without what a burst cannot see."""
        return self.draws.keys  # type: ignore[return-value]

    # The choice

    @property
    def choice(self) -> LoaderConfig | None:
        """The cheapest of those that count as equally fast; None where nothing has succeeded."""
        return self.choice_of(self._proven) if self._seen else None

    def choice_of(self, configs: Sequence[LoaderConfig]) -> LoaderConfig:
        """The same, of some configurations alone."""
        draws = self.draws.of([config.key() for config in configs])
        return self.space.as_kept(configs[choose(draws, [self.space.cost(c) for c in configs], self.tolerance)])

    def probability(self, config: LoaderConfig) -> float:
        """Of losing no more than the tolerance against the best of all."""
        return float(self.draws.within(self.tolerance)[self._where(config)])

    def loss(self, config: LoaderConfig) -> float:
        """What it is expected to lose against the best of all, relatively."""
        return float(self.draws.losses[:, self._where(config)].mean())

    def predicted(self, config: LoaderConfig) -> float | None:
        """Samples/s that are expected; None before anything was measured, and of what is not in the grid."""
        if not self._seen or config.key() not in self.configs:
            return None
        return math.exp(float(self.draws.paths[:, self._where(config)].mean()))

    # What to measure

    def proposal(self, passing_over: Collection[LoaderConfig] = ()) -> LoaderConfig | None:
        """The untried configuration of which a burst teaches most; None when the choice is safe or no burst is worth it.

        Once workers have failed, what would be chosen if it worked is tried before it is.

        Args:
            passing_over: what is measured elsewhere at this moment.
        """
        choice = self.choice
        if choice is None:
            return None
        taken = {trial.config.key() for trial in self.trials} | {config.key() for config in passing_over}
        wanted = self.choice_of(self.configs)
        if wanted.key() not in self._proven and wanted.key() not in taken:
            return wanted
        if self.probability(choice) >= SAFE:
            return None
        gains = self.draws.knowledge_gradient(self._where(choice))
        untried = [index for index, config in enumerate(self.configs) if config not in taken]
        best = max(untried, key=lambda i: (round(float(gains[i]), 4), -self.configs[i].num_workers), default=None)
        if best is None or gains[best] <= WORTHWHILE * self.tolerance:
            return None
        return self.space.as_kept(self.configs[best])

    def shortlist(self, most: int = 2) -> list[LoaderConfig]:
        """The few configurations that deserve fresh rounds: the choice, and those that may well be what it misses.

        Each further one leaves hardly more to be lost than any must, when the best of them all is taken; of such the cheapest.
        """
        choice = self.choice
        if choice is None:
            return []
        losses = self.draws.losses
        taken = [self._where(choice)]
        left, risky = losses[:, taken[0]], [c not in self._proven for c in self.configs]
        while len(taken) < most:
            means = np.where(risky, np.inf, np.minimum(left[:, None], losses).mean(axis=0))
            enough = np.flatnonzero(means <= means.min() + FURTHER * self.tolerance)
            best = min(map(int, enough), key=lambda i: (self.space.cost(self.configs[i]), means[i]))
            if left.mean() - means[best] < FURTHER * self.tolerance:
                break
            taken.append(best)
            left = np.minimum(left, losses[:, best])
        return [self.space.as_kept(self.configs[index]) for index in taken]

    # What failed

    @cached_property
    def most_workers(self) -> int | None:
        """Workers beyond which nothing is tried after a failure, which may have cost a deadline; None before there is one.

        The geometric middle of what succeeded and what failed: one, where no number of workers has succeeded. What failed with
        pinning, or with another batch size, says nothing of workers.
        """
        most = self._most_that_succeeded
        tried = [(t.config, t.failure.kind) for t in self.trials if t.failure is not None]
        tried = [each for each in tried if each[1] != "infeasible" and self.space.is_modelled(each[0])]
        failed = [config.num_workers for config, _ in tried if config.num_workers > most]
        return min(max(most + 1, math.isqrt(most * min(failed))), min(failed) - 1) if failed else None

    @cached_property
    def _most_that_succeeded(self) -> int:
        return max((trial.config.num_workers for trial in self._seen), default=0)

    @cached_property
    def _proven(self) -> list[LoaderConfig]:
        """What may be chosen: once workers have failed, no more than have succeeded; a hang in a round is dear."""
        most = self._most_that_succeeded
        return [c for c in self.configs if self.most_workers is None or c.num_workers <= most]

    def _configs(self) -> list[LoaderConfig]:
        """What is believed of: what may be proposed, and what was observed."""
        useful = None if self.twin is None else self.twin.useful_workers
        limits = [n for n in (self.most_workers, self.context.epoch_batches, useful) if n is not None]
        tried = dict.fromkeys(trial.config.key() for trial in self._seen)
        failed = {trial.config.key() for trial in self.trials if trial.failure is not None} - tried.keys()
        legal = [config.key() for config in self.space.candidates(min(limits, default=None))]
        configs = [c for c in dict.fromkeys([*legal, *tried]) if c not in failed]
        return [c for c in configs if c in tried or self.most_workers is None or c.num_workers <= self.most_workers]

    def _where(self, config: LoaderConfig) -> int:
        return self.configs.index(config.key())

    def _mean(self, configs: Sequence[LoaderConfig], solved: Solved | None) -> Floats:
        if solved is not None:
            expected: Floats = np.log(np.maximum(solved.samples_per_s, 1e-12))
            return expected
        logs = [trial.log_rate for trial in self._seen if trial.log_rate is not None]
        return np.full(len(configs), float(np.mean(logs)) if logs else 0.0)

    def _observed(self, configs: Sequence[LoaderConfig]) -> Observed:
        where = {config: index for index, config in enumerate(configs)}
        together = [(t.round is None, t.number if t.round is None else t.round) for t in self._seen]
        groups = list(dict.fromkeys(together))
        return Observed(
            where=np.array([where[t.config.key()] for t in self._seen], dtype=np.int64),
            logs=np.array([t.log_rate for t in self._seen], dtype=np.float64),
            variances=np.array([_own_sd(t) ** 2 for t in self._seen], dtype=np.float64),
            rounds=np.array([groups.index(each) for each in together], dtype=np.int64),
        )


def equally_fast(draws: Draws, tolerance: float) -> list[int]:
    """Positions of those that count as equally fast: within the tolerance of the best about as probably as any, or surely."""
    within = draws.within(tolerance)
    return [int(index) for index in np.flatnonzero(within >= min(SAFE, float(within.max()) - ALIKE))]


def choose(draws: Draws, costs: Sequence[tuple[float, ...]], tolerance: float) -> int:
    """Position of the cheapest of those that count as equally fast."""
    losses = draws.losses.mean(axis=0)
    return min(equally_fast(draws, tolerance), key=lambda i: (costs[i], losses[i]))


def _covariance(configs: Sequence[LoaderConfig], space: Space, solved: Solved | None) -> Floats:
    """Covariance of the errors in the logarithm of the rate: similar configurations share them.

    A knob that the twin does not know changes all configurations that have it alike.
    """
    points = np.array([(math.log2(c.num_workers + 0.5), 0.5 * math.log2(c.prefetch_factor or 1)) for c in configs])
    distance = ((points[:, None, :] - points[None, :, :]) / LENGTH_SCALE) ** 2
    sd = UNKNOWN_SD if solved is None else MODEL_SD
    covariance: Floats = LEVEL_SD**2 + sd**2 * np.exp(-0.5 * distance.sum(axis=2))
    usual = [space.as_set(config) for config in configs]
    for knob in UNMODELLED:
        values = [getattr(config, knob) for config in configs]
        odd = [value != getattr(plain, knob) for value, plain in zip(values, usual, strict=True)]
        if any(odd):
            same = np.array([[one == other for other in values] for one in values])
            covariance += UNMODELLED_SD**2 * np.outer(odd, odd) * same
    return covariance


def _own_sd(trial: Trial) -> float:
    """Standard deviation of a rate's logarithm, as the batches of its burst show it."""
    rate = None if trial.measurement is None else trial.measurement.samples_per_s
    if rate is None or not rate.is_telling:
        return POOREST_BURST_SD
    return min(math.log(rate.high / rate.value) / Z_95, POOREST_BURST_SD)
