"""What the bursts so far say of every configuration: one belief, whose draws answer every question.

    trials ──► twin (queues and cores) ──► rates expected ──► Gaussian process, corrected by every rate ──► draws

The Gaussian process over (workers, prefetch) and the settings that the twin does not model takes up what the twin gets wrong
(Rasmussen and Williams 2006, algorithm 2.1). Where there are rates but no traces, as in a study of a user's own objective, the
process begins from nothing. `predict` tells people rate and memory of what did not run. No clock, no Optuna, no process.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from autotune_loader.search.draws import NEAR_BEST, Draws, Observed, choose, draw, sufficient, with_sufficiency
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.search.rule import deepest_prefetch
from autotune_loader.search.space import UNMODELLED, WORKER_BASE_BYTES, Context, Space, memory_bytes
from autotune_loader.search.twin import Solved, Twin
from autotune_loader.values import TORCH_PREFETCH_FACTOR, FailureKind, Interval, LoaderConfig, Round, Trial, log_ratios
from autotune_loader.values.statistics import Z_95
from autotune_loader.values.units import bytes_text

MODEL_SD = 0.055  # relative error that the twin's shape may have between distant configurations
ROUGH_SD, ROUGH_SCALE = 0.027, 0.1
"""What even neighbours do not share of it, and how far apart, in length scales, nothing of that is shared: 93 instead of 91%
of choices are near the best (studies/regret/README.md)."""
LENGTH_SCALE = 1.2  # how far apart, in doublings, configurations still share the twin's error
LEVEL_SD = 0.1  # error of the twin's level: all bursts may have been slow together
UNKNOWN_SD = 0.7  # without a twin anything may be twice as fast as anything else
UNMODELLED_SD = 0.1  # what a setting that the twin does not model may change, relative
NO_SLOWER = 0.005
"""A queue may be slower than a deeper one by so much, relatively: it takes less memory, and fewer locked pages."""
CERTAIN = 0.95  # a choice is safe when it loses no more than the tolerance against the best with this probability
POOREST_BURST_SD = 0.2  # relative, of a burst whose few batches give no better interval
MOST_OBSERVED = 120
"""Latest rates that a belief rests on, as its arithmetic grows with their number, cubed. A run has fewer; a study may not."""
MAX_FAILURES = 2  # what has failed this often is out although it has succeeded, too; after a hang at once
OF_MEMORY = ("out_of_memory", "oom_killed", "memory_guard", "descriptors")  # what fewer batches ahead may avoid
OF_WORKERS = ("oom_killed", "memory_guard", "crashed", "deadline", "descriptors", "shared_memory")
"""What fails for the number of workers, whatever else was set."""


class Belief:
    """What some trials say of every configuration of a space.

    Args:
        space: what is legal.
        context: cores and step.
        trials: all that was measured.
        tolerance: relative difference that counts as equally fast.
        observations: what these trials tell the twin; None for what their traces do.
        is_open: whether configurations that never ran are considered.
        barred: keys of what cannot run.
    """

    def __init__(
        self,
        space: Space,
        context: Context,
        trials: Sequence[Trial],
        *,
        tolerance: float = 0.02,
        observations: Sequence[Observation] | None = None,
        is_open: bool = True,
        barred: Collection[LoaderConfig] = (),
    ) -> None:
        self.space: Space = space
        self.context: Context = context
        self.tolerance: float = tolerance
        self.trials: tuple[Trial, ...] = tuple(trials)
        self._is_open, self._barred, self._observations = is_open, barred, observations
        self._seen = [trial for trial in trials if trial.log_rate is not None]
        self._failed = [(trial.config, trial.failure.kind) for trial in trials if trial.failure is not None]
        self._most_that_succeeded = max((trial.config.num_workers for trial in self._seen), default=0)

    @cached_property
    def twin(self) -> Twin | None:
        """The queueing model of all bursts whose stages were measured; None before there is any."""
        if self._observations is not None:
            return Twin(self._observations, self.context)
        measured = [(t.config, m) for t in self._seen if (m := t.measurement) and m.step_s + m.service_s > 0]
        known = [Observation.of(config, m) for config, m in measured if self.space.is_modelled(config)]
        return Twin(known, self.context) if known else None

    @cached_property
    def sustained(self) -> Draws:
        """Rates as they may be in the midst of an epoch, of every legal configuration and every one that was observed."""
        configs = self.configs
        solved = None if self.twin is None else self.twin.predict(configs)
        drawn = draw(configs, self._mean(solved), _covariance(configs, self.space, solved), self._observed())
        if self.twin is None or solved is None:
            return drawn
        found = sufficient(configs, self.twin.observations, solved.loop_use, self.space.is_modelled)
        return replace(drawn, paths=with_sufficiency(drawn.paths, found))

    @cached_property
    def draws(self) -> Draws:
        """The same of whole epochs: workers that do not live on start anew in each."""
        sizes = [trial.measurement.batch_size for trial in self._seen if trial.measurement]
        if not sizes or not self.context.epoch_batches:
            return self.sustained
        start_s, paths = np.zeros(len(self.configs)), self.sustained.paths
        for index, config in enumerate(self.configs):
            if not self.space.as_kept(config).persistent_workers:
                start_s[index] = starting_s(self._seen, config.num_workers, self.context)
        samples = self.context.epoch_batches * sizes[0]
        return replace(self.sustained, paths=paths - np.log1p(start_s * np.exp(paths) / samples))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The paired rounds, in order."""
        return tuple(each for each in rounds_of(self.trials).values() if each.rates)

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

    def contradiction(self, choice: LoaderConfig) -> LoaderConfig | None:
        """What the rounds by themselves say to be faster by more than the tolerance, by the most; None where they agree."""
        ran = {key for each in self.rounds for key in each.rates if key.key() in self.configs}
        beside = {key: log_ratios(self.rounds, key, choice) for key in sorted(ran, key=self.space.cost)}
        ahead = {key: statistics.fmean(logs) for key, logs in beside.items() if len(logs) > 1}
        fastest = max(ahead, key=ahead.__getitem__, default=choice)
        return fastest if ahead.get(fastest, 0.0) > math.log1p(self.tolerance) else None

    # What to measure

    def rival(self, choice: LoaderConfig) -> LoaderConfig | None:
        """What the choice may miss: what most lowers the loss that is expected of the better of the two.

        Among near-equals the cheapest; None where there is no other.
        """
        losses, here = self.draws.losses, self._where(choice)
        means = np.minimum(losses[:, [here]], losses).mean(axis=0)
        if len(means) < 2:
            return None
        known = means[here] - np.delete(means, here).min() < NEAR_BEST * self.tolerance  # none lowers it
        means = losses.mean(axis=0) if known else means
        means[here] = np.inf
        near = np.flatnonzero(means <= means.min() + NEAR_BEST * self.tolerance)
        best = min(map(int, near), key=lambda i: (self.space.cost(self.configs[i]), means[i]))
        return self.space.as_kept(self.configs[best])

    # What failed

    @cached_property
    def most_workers(self) -> float:
        """Workers beyond which nothing is tried after a failure, which may have cost a deadline; infinite before there is one.

        The geometric middle of what succeeded and what failed: one, where no number of workers has succeeded. What failed for
        memory with a deep queue says nothing of workers yet.
        """
        most = self._most_that_succeeded
        failed = [c.num_workers for c, kind in self._failures if c.num_workers > most and not _is_of_queue(c, kind)]
        return min(max(most + 1, math.isqrt(most * min(failed))), min(failed) - 1) if failed else math.inf

    @property
    def proven(self) -> tuple[LoaderConfig, ...]:
        """What may be chosen: once workers have failed, no more than have succeeded; a hang in a round is dear."""
        most = self._most_that_succeeded if self.most_workers < math.inf else math.inf
        return tuple(config for config in self.configs if config.num_workers <= most)

    @property
    def _failures(self) -> list[tuple[LoaderConfig, FailureKind]]:
        """What failed, and how, for its workers: not by arithmetic, nor perhaps by another setting."""
        return [(c, kind) for c, kind in self._failed if kind in OF_WORKERS or (kind != "infeasible" and not _odd(c))]

    @cached_property
    def configs(self) -> tuple[LoaderConfig, ...]:
        """What is believed of, without what a burst cannot see: what may be proposed, and what works."""
        useful = math.inf if self.twin is None else self.twin.useful_workers
        most_workers = min(self.most_workers, self.context.epoch_batches or math.inf, useful)
        tried = list(dict.fromkeys(trial.config.key() for trial in self._seen))
        often = Counter(config.key() for config, _ in self._failed)
        often.update({config.key(): MAX_FAILURES for config, kind in self._failed if kind == "deadline"})
        out = {config for config, failures in often.items() if failures >= MAX_FAILURES or config not in tried}
        out.update(self._barred)
        # A setting with which something failed, and nothing worked, is not what fails with fewer workers as well.
        bad = {each for config, kind in self._failed if kind not in OF_WORKERS for each in _odd(config)}
        bad -= {each for config in tried for each in _odd(config)}
        queues = [config.batches_in_flight for config, kind in self._failures if _is_of_queue(config, kind)]
        most_in_flight = max(min(queues, default=math.inf) / 2, 1)
        legal = self.space.candidates(most_workers) if self._is_open else ()
        proposed = [
            config
            for config in self._of_useful_depth([each.key() for each in legal])
            if config.num_workers <= self.most_workers
            and config.batches_in_flight <= most_in_flight
            and not bad & _odd(config)
        ]
        return tuple(config for config in dict.fromkeys([*proposed, *tried]) if config not in out)

    def _of_useful_depth(self, configs: Sequence[LoaderConfig]) -> list[LoaderConfig]:
        """Those with a queue that costs nothing, as it may bridge slow batches that no burst has seen, or is as deep as needed.

        The user's own stays, however deep.
        """
        deepest = max(deepest_prefetch(self.context), min(self.space.prefetch_factors))
        own = {each.key() for each in self.space.also}
        dear = {config.num_workers for config in configs if not self.space.is_cheap(config)}
        needed = deepest
        if dear and self.twin is not None:
            needed = self.twin.needed_prefetch(
                [each for each in configs if each.num_workers in dear and each not in own], NO_SLOWER
            )

        def is_useful(config: LoaderConfig) -> bool:
            depth = config.prefetch_factor or 0
            if config in own or (config.num_workers in dear and depth == needed):
                return True
            return self.space.is_cheap(config) and (needed if config.num_workers in dear else 0) <= depth <= deepest

        return [config for config in configs if is_useful(config)]

    def _where(self, config: LoaderConfig) -> int:
        return self.configs.index(config.key())

    def _mean(self, solved: Solved | None) -> Floats:
        """Of the logarithms of the rates, before they were observed."""
        if solved is not None:
            expected: Floats = np.log(np.maximum(solved.samples_per_s, 1e-12))
            return expected
        logs = [trial.log_rate for trial in self._seen if trial.log_rate is not None]
        return np.full(len(self.configs), float(np.mean(logs)) if logs else 0.0)

    def _observed(self) -> Observed:
        where = {config: index for index, config in enumerate(self.configs)}
        seen = [trial for trial in self._seen if trial.config.key() in where][-MOST_OBSERVED:]
        together = [(t.round is None, t.number if t.round is None else t.round) for t in seen]
        groups = list(dict.fromkeys(together))
        return Observed(
            where=np.array([where[t.config.key()] for t in seen], dtype=np.int64),
            logs=np.array([t.log_rate for t in seen], dtype=np.float64),
            variances=np.array([_own_sd(t) ** 2 for t in seen], dtype=np.float64),
            rounds=np.array([groups.index(each) for each in together], dtype=np.int64),
        )


def starting_s(trials: Sequence[Trial], workers: int, context: Context) -> float:
    """Seconds in which so many workers start: by the most similar number that started as in training, or one such process."""
    measured = [
        (trial.config.num_workers, m) for trial in trials if trial.config.num_workers and (m := trial.measurement)
    ]
    begun = [(count, max(m.first_batch_s - m.service_s, 0.0)) for count, m in measured if m.first_batch_s is not None]
    count, seconds = min(begun, key=lambda each: abs(each[0] - workers), default=(1, context.start_s))
    return seconds * max(1.0, workers / max(count, context.usable_cores)) if workers else 0.0


def _covariance(configs: Sequence[LoaderConfig], space: Space, solved: Solved | None) -> Floats:
    """Covariance of the errors in the logarithm of the rate: similar configurations share them.

    A setting that the twin does not model changes all configurations that have it alike.
    """
    points = np.array([(math.log2(c.num_workers + 0.5), 0.5 * math.log2(c.prefetch_factor or 1)) for c in configs])
    distance = np.sqrt((((points[:, None, :] - points[None, :, :]) / LENGTH_SCALE) ** 2).sum(axis=2))
    sd = UNKNOWN_SD if solved is None else MODEL_SD
    covariance: Floats = LEVEL_SD**2 + sd**2 * np.exp(-0.5 * distance**2)
    covariance += ROUGH_SD**2 * np.exp(-distance / ROUGH_SCALE)
    usual = [space.as_set(config) for config in configs]
    for name in UNMODELLED:
        values = [getattr(config, name) for config in configs]
        odd = [value != getattr(plain, name) for value, plain in zip(values, usual, strict=True)]
        if any(odd):
            each_value = np.array([values.index(value) for value in values])
            covariance += UNMODELLED_SD**2 * np.outer(odd, odd) * np.equal.outer(each_value, each_value)
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
    is_deep = (config.prefetch_factor or 0) > TORCH_PREFETCH_FACTOR
    return kind == "shared_memory" or (kind in OF_MEMORY and is_deep)


def _odd(config: LoaderConfig) -> frozenset[tuple[str, Any]]:
    """What it sets, beside workers and prefetch, to another value than torch's default."""
    usual = LoaderConfig()
    return frozenset((name, value) for name in UNMODELLED if (value := getattr(config, name)) != getattr(usual, name))


def rounds_of(trials: Sequence[Trial]) -> dict[int, Round]:
    """The rounds of trials that are part of one, in order, by their numbers."""
    numbers = sorted({trial.round for trial in trials if trial.round is not None})
    return {number: _round([trial for trial in trials if trial.round == number]) for number in numbers}


def _round(trials: Sequence[Trial]) -> Round:
    foreign = [m.foreign_cpu_share for t in trials if (m := t.measurement) and m.foreign_cpu_share is not None]
    rates = {trial.config: rate for trial in trials if (rate := trial.samples_per_s) is not None}
    return Round(rates=rates, foreign_cpu_share=max(foreign, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of one configuration."""

    config: LoaderConfig
    samples_per_s: Interval
    """Sustained rate, with its 95% interval; `count` is the number of bursts."""
    memory_bytes: int | None
    """Peak memory of the process and its workers, shared pages counted once; None where no burst told."""

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {bytes_text(self.memory_bytes)}"
        return f"{self.config}: {self.samples_per_s} samples/s expected{memory}"


@np.errstate(all="ignore")  # a script may have made an error of an underflow
def predict(
    trials: Sequence[Trial],
    configs: Sequence[LoaderConfig],
    *,
    usable_cores: int,
    step_s: float | None = None,
    step_cores: float = 1.0,
    cores: float | None = None,
) -> list[Prediction]:
    """What to expect of each configuration, by what these trials say; on a machine with other cores, where these are given.

    Raises:
        ValueError: nothing was measured, or `cores` is not positive.
    """
    if cores is not None and not cores > 0:
        raise ValueError(f"cores={cores!r} must be greater than 0, such as cores=2")
    known = [t for t in trials if t.measurement is not None and t.config.batch_size is None]
    if not known:
        raise ValueError("predict() needs at least one successful trial. Try a result of tune() with one.")
    asked = [plain(config) for config in configs]
    context = Context(usable_cores=usable_cores, step_cores=step_cores, step_s=step_s)
    seen = [replace(each, config=plain(each.config)) for each in known]
    belief = Belief(Space(max_workers=0, also=tuple(asked)), context, seen)
    logs, more = belief.sustained.of(asked).paths, np.zeros(len(asked))
    if cores is not None and belief.twin is not None:
        there, here = belief.twin.predict(asked, cores), belief.twin.predict(asked)
        more = np.log(there.samples_per_s / here.samples_per_s)
    low, high = np.exp(np.quantile(logs, [0.025, 0.975], axis=0) + more)
    rates = np.exp(logs.mean(axis=0) + more)
    return [
        Prediction(
            config=config,
            samples_per_s=Interval(value=rate, low=lowest, high=highest, count=len(known)),
            memory_bytes=_peak_bytes(config, known),
        )
        for config, rate, lowest, highest in zip(configs, *(each.tolist() for each in (rates, low, high)), strict=True)
    ]


def plain(config: LoaderConfig) -> LoaderConfig:
    """Workers and prefetch alone, which is what the twin models."""
    return LoaderConfig().with_workers(config.num_workers, config.prefetch_factor)


def _peak_bytes(config: LoaderConfig, trials: Sequence[Trial]) -> int | None:
    """Peak memory that is expected: what a worker more took in these bursts, and its queue as full as it may get.

    The slope is the median of those between bursts (Sen 1968), so that one burst beside a growing neighbour does not turn it.
    """
    bursts = [(trial.config, m) for trial in trials if (m := trial.measurement)]
    told = [(each, took, burst.batch_bytes) for each, burst in bursts if (took := burst.taken_bytes) is not None]
    # Bursts without workers share nothing with anybody and tell little of those with.
    told = [each for each in told if each[0].num_workers] or told
    if not told:
        return None
    rest = [
        (each.num_workers, took - memory_bytes(each, worker_bytes=0, batch_bytes=size)) for each, took, size in told
    ]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(rest, 2) if a[0] != b[0]]
    slope = statistics.median(slopes) if slopes else 0.0
    worker = slope if slope > 0 else WORKER_BASE_BYTES
    base = statistics.median(took - workers * worker for workers, took in rest)
    batch = statistics.median(size for *_, size in told)
    return round(max(base, 0.0) + memory_bytes(config, worker_bytes=worker, batch_bytes=batch))
