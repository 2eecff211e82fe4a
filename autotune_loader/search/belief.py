"""What the bursts so far say of every configuration: one belief, whose draws answer every question.

    trials ──► twin (queues and cores) ──► rates expected ──► Gaussian process, corrected by every rate ──► draws

The twin knows queues and cores; the Gaussian process over (workers, prefetch) and the knobs that the twin does not know takes
up what it gets wrong (Rasmussen and Williams 2006, algorithm 2.1). Where there are rates but no traces, as in a study of a
user's own objective, the process begins from nothing. No clock, no Optuna, no process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from autotune_loader.search.draws import Draws, Observed, draw
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.search.rule import deepest_prefetch
from autotune_loader.search.space import UNMODELLED, Context, Space
from autotune_loader.search.sufficiency import sufficient, with_sufficiency
from autotune_loader.search.twin import Solved, Twin
from autotune_loader.values import Z_95, FailureKind, LoaderConfig, Round, Trial

MODEL_SD = 0.055
"""Relative error that the twin's shape may have between distant configurations (its goal is a median error of 3%)."""
ROUGH_SD, ROUGH_SCALE = 0.027, 0.1
"""What even neighbours do not share of it, and how far apart, in length scales, nothing of that is shared."""
LEVEL_SD = 0.1
"""And its level: all bursts may have been slow together."""
UNKNOWN_SD = 0.7
"""Without a twin anything may be twice as fast as anything else."""
LENGTH_SCALE = 1.2
"""How far apart, in doublings, configurations still share the twin's error."""
UNMODELLED_SD = 0.1
"""What a knob that the twin does not know may change, relative."""
CERTAIN = 0.95
"""A choice is safe when it loses no more than the tolerance against the best of all with this probability."""
SURE = 0.9
"""A configuration counts as equally fast when it does so with this probability, or where none does, with the highest."""
LIKELY = 0.5
"""A probability below this tells little."""
NEAR_BEST = 0.1
"""Of rivals that save as much, within this share of the tolerance, the cheapest is taken."""
POOREST_BURST_SD = 0.2
"""Relative standard deviation of a burst whose few batches give no better interval."""
MAX_FAILURES = 2
"""What has failed this often is out although it has succeeded, too; after a hang at once."""
OF_MEMORY, SHALLOW = ("out_of_memory", "oom_killed", "memory_guard", "descriptors"), 2
"""Failures that fewer batches ahead may avoid, down to so many for each worker."""
TORCHS = LoaderConfig()
OF_WORKERS = ("oom_killed", "memory_guard", "crashed", "deadline", "descriptors", "shared_memory")
"""Failures of the workers, whatever other knobs were set."""


class Belief:
    """What some trials say of every configuration of a space.

    Args:
        space: what is legal.
        context: cores and step.
        trials: all that was measured.
        tolerance: relative difference that counts as equally fast.
        is_open: whether configurations that never ran are believed of, too.
        barred: what cannot run, without what a burst cannot see.
    """

    def __init__(
        self,
        space: Space,
        context: Context,
        trials: Sequence[Trial],
        *,
        tolerance: float = 0.02,
        is_open: bool = True,
        barred: Collection[LoaderConfig] = (),
    ) -> None:
        self.space, self.context, self.tolerance, self._is_open = space, context, tolerance, is_open
        self._barred = barred
        self.trials = tuple(trials)
        self._seen = [trial for trial in trials if trial.log_rate is not None]

    @cached_property
    def twin(self) -> Twin | None:
        """The queueing model of all bursts whose stages were measured; None before there is any."""
        measured = [(t.config, t.measurement) for t in self._seen if t.measurement is not None]
        known = [(config, m) for config, m in measured if m.step_s + m.service_s > 0 and self.space.is_modelled(config)]
        return Twin.fit([Observation.of(config, m) for config, m in known], self.context) if known else None

    @cached_property
    def sustained(self) -> Draws:
        """Rates as they may be in the midst of an epoch, of every legal configuration and every one that was observed."""
        configs = self.configs
        solved = None if self.twin is None else self.twin.predict(configs)
        prior = draw(
            configs, self._mean(configs, solved), _covariance(configs, self.space, solved), self._observed(configs)
        )
        if self.twin is None or solved is None:
            return prior
        found = sufficient(configs, self.twin.observations, solved.loop_use)
        return replace(prior, paths=with_sufficiency(prior.paths, found))

    @cached_property
    def draws(self) -> Draws:
        """The same of whole epochs: workers that do not live on start anew in each."""
        begun = [(t.config.num_workers, m) for t in self._seen if t.config.num_workers and (m := t.measurement)]
        batches, configs = self.context.epoch_batches, self.configs
        if not begun or not batches:
            return self.sustained
        start_s = np.zeros(len(configs))
        for index, config in enumerate(configs):
            if config.num_workers and not self.space.as_kept(config).persistent_workers:
                _, nearest = min(begun, key=lambda each: abs(each[0] - config.num_workers))
                start_s[index] = max(nearest.first_batch_s - nearest.service_s, 0.0)
        epoch = batches * begun[0][1].batch_size
        paths = self.sustained.paths
        return replace(self.sustained, paths=paths - np.log1p(start_s * np.exp(paths) / epoch))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The paired rounds, in order."""
        found: dict[int, list[Trial]] = {}
        for trial in self.trials:
            if trial.round is not None:
                found.setdefault(trial.round, []).append(trial)
        rounds = (_round(found[number]) for number in sorted(found))
        return tuple(each for each in rounds if each.rates)

    # The choice

    @property
    def choice(self) -> LoaderConfig | None:
        """The cheapest of those that count as equally fast; None where nothing has succeeded."""
        return self.choice_of(self.proven) if self._seen and self.proven else None

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
        """Samples/s that a burst is expected to show; None before anything was measured, and of what is not in the grid."""
        if not self._seen or config.key() not in self.configs:
            return None
        return math.exp(float(self.sustained.paths[:, self._where(config)].mean()))

    def is_faster(self, one: LoaderConfig, other: LoaderConfig, factor: float = 1.0) -> float:
        """Probability that one is more than so many times as fast as another."""
        paths = self.draws.paths
        return float((paths[:, self._where(one)] - paths[:, self._where(other)] > math.log(factor)).mean())

    # What to measure

    def rival(self, choice: LoaderConfig) -> tuple[LoaderConfig, float] | None:
        """What the choice may miss, and what a pair of both adds to the probability that the best of them is near the best.

        The configuration that most lowers what the better of the two is expected to lose; among near-equals the cheapest. None
        where there is no other.
        """
        losses, here = self.draws.losses, self._where(choice)
        means = np.minimum(losses[:, [here]], losses).mean(axis=0)
        if len(means) < 2:
            return None
        means[here] = np.inf
        near = np.flatnonzero(means <= means.min() + NEAR_BEST * self.tolerance)
        best = min(map(int, near), key=lambda i: (self.space.cost(self.configs[i]), means[i]))
        return self.space.as_kept(self.configs[best]), self.draws.worth_of_pair(here, best, self.tolerance)

    # What failed

    @cached_property
    def most_workers(self) -> int | None:
        """Workers beyond which nothing is tried after a failure, which may have cost a deadline; None before there is one.

        The geometric middle of what succeeded and what failed: one, where no number of workers has succeeded. What failed for
        memory with a deep queue says nothing of workers yet.
        """
        most = self._most_that_succeeded
        failed = [c.num_workers for c, kind in self._failures if c.num_workers > most and not _is_of_queue(c, kind)]
        return min(max(most + 1, math.isqrt(most * min(failed))), min(failed) - 1) if failed else None

    @cached_property
    def proven(self) -> tuple[LoaderConfig, ...]:
        """What may be chosen: once workers have failed, no more than have succeeded; a hang in a round is dear."""
        most = self._most_that_succeeded
        return tuple(c for c in self.configs if self.most_workers is None or c.num_workers <= most)

    @cached_property
    def _most_that_succeeded(self) -> int:
        return max((trial.config.num_workers for trial in self._seen), default=0)

    @cached_property
    def _failures(self) -> list[tuple[LoaderConfig, FailureKind]]:
        """What failed, and how, for its workers: not by arithmetic, nor perhaps by another knob."""
        failed = [(t.config, t.failure.kind) for t in self.trials if t.failure is not None]
        return [each for each in failed if each[1] in OF_WORKERS or (each[1] != "infeasible" and not _odd(each[0]))]

    @cached_property
    def configs(self) -> tuple[LoaderConfig, ...]:
        """What is believed of, without what a burst cannot see: what may be proposed, and what works."""
        useful = None if self.twin is None else self.twin.useful_workers
        limits = [n for n in (self.most_workers, self.context.epoch_batches, useful) if n is not None]
        tried = list(dict.fromkeys(trial.config.key() for trial in self._seen))
        failed = [(t.config, t.failure.kind) for t in self.trials if t.failure is not None]
        often = Counter(config.key() for config, _ in failed)
        often.update({config.key(): MAX_FAILURES for config, kind in failed if kind == "deadline"})
        out = {config for config, failures in often.items() if failures >= MAX_FAILURES or config not in tried}
        out.update(self._barred)
        queues = [config.batches_in_flight for config, kind in self._failures if _is_of_queue(config, kind)]
        # A knob with which something failed, and nothing worked, is not what fails with fewer workers as well.
        bad = {knob for config, kind in failed if kind not in OF_WORKERS for knob in _odd(config)}
        bad -= {knob for config in tried for knob in _odd(config)}
        legal = self.space.candidates(min(limits, default=None)) if self._is_open else ()
        deepest = deepest_prefetch(self.context)
        proposed = [
            config
            for config in (each.key() for each in legal)
            if (self.most_workers is None or config.num_workers <= self.most_workers)
            and config.batches_in_flight <= max(min(queues, default=math.inf) / 2, 1)
            and (config.prefetch_factor or 0) <= deepest
            and not bad & _odd(config)
        ]
        return tuple(config for config in dict.fromkeys([*proposed, *tried]) if config not in out)

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
        seen = [trial for trial in self._seen if trial.config.key() in where]
        together = [(t.round is None, t.number if t.round is None else t.round) for t in seen]
        groups = list(dict.fromkeys(together))
        return Observed(
            where=np.array([where[t.config.key()] for t in seen], dtype=np.int64),
            logs=np.array([t.log_rate for t in seen], dtype=np.float64),
            variances=np.array([_own_sd(t) ** 2 for t in seen], dtype=np.float64),
            rounds=np.array([groups.index(each) for each in together], dtype=np.int64),
        )


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


def _covariance(configs: Sequence[LoaderConfig], space: Space, solved: Solved | None) -> Floats:
    """Covariance of the errors in the logarithm of the rate: similar configurations share them.

    A knob that the twin does not know changes all configurations that have it alike.
    """
    points = np.array([(math.log2(c.num_workers + 0.5), 0.5 * math.log2(c.prefetch_factor or 1)) for c in configs])
    distance = np.sqrt((((points[:, None, :] - points[None, :, :]) / LENGTH_SCALE) ** 2).sum(axis=2))
    sd = UNKNOWN_SD if solved is None else MODEL_SD
    covariance: Floats = LEVEL_SD**2 + sd**2 * np.exp(-0.5 * distance**2)
    covariance += ROUGH_SD**2 * np.exp(-distance / ROUGH_SCALE)
    usual = [space.as_set(config) for config in configs]
    for knob in UNMODELLED:
        values = [getattr(config, knob) for config in configs]
        odd = [value != getattr(plain, knob) for value, plain in zip(values, usual, strict=True)]
        if any(odd):
            same = np.array([[one == other for other in values] for one in values])
            covariance += UNMODELLED_SD**2 * np.outer(odd, odd) * same
    return covariance


def _own_sd(trial: Trial) -> float:
    """Standard deviation of a rate's logarithm, as the batches of its burst show it; 0 for a value that came without any."""
    measured = trial.measurement
    if measured is None or not measured.samples:
        return 0.0
    rate = measured.samples_per_s
    return min(math.log(rate.high / rate.value) / Z_95, POOREST_BURST_SD) if rate.is_telling else POOREST_BURST_SD


def _is_of_queue(config: LoaderConfig, kind: FailureKind) -> bool:
    """Whether fewer batches ahead may avoid the failure: of shared memory always, of memory where the queue is deep."""
    is_deep = (config.prefetch_factor or 0) > SHALLOW
    return kind == "shared_memory" or (kind in OF_MEMORY and is_deep)


def _odd(config: LoaderConfig) -> frozenset[tuple[str, Any]]:
    """What it sets, beside workers and prefetch, to another value than torch's default."""
    return frozenset((name, value) for name in UNMODELLED if (value := getattr(config, name)) != getattr(TORCHS, name))


def _round(trials: Sequence[Trial]) -> Round:
    foreign = [m.foreign_cpu_share for t in trials if (m := t.measurement) and m.foreign_cpu_share is not None]
    rates = {trial.config: rate for trial in trials if (rate := trial.samples_per_s) is not None}
    return Round(rates=rates, foreign_cpu_share=max(foreign, default=None))
