"""Which configuration to try next, and when nothing is worth trying: the twin's predictions, corrected by what was measured.

    scouts ──► twin ──► posterior = twin + smooth residual of the measurements ──► largest expected improvement
                 ▲                                                                          │
                 └────────────────────── burst ◄────────────────────────────────────────────┘

The twin knows queues and cores; the residual, a small Gaussian process over (workers, prefetch, threads), takes up what it
gets wrong, so that a wrong twin cannot trap the search. Pure functions of the trials: no clock, no Optuna, no process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.config import TORCH_PREFETCH_FACTOR, LoaderConfig
from autotune_loader.space import Space
from autotune_loader.trial import Measurement, Trial
from autotune_loader.twin import Observation, Twin

# Relative error that the twin's shape may have between distant configurations (its goal is a median error of 3 %).
MODEL_SD = 0.06
# How far apart, in doublings, configurations still share the twin's error.
LENGTH_SCALE = 1.2
# Relative noise of one burst that its own interval does not show: drift and neighbours between bursts.
BURST_SD = 0.02
# From so many cores on, a scout stands between one worker and as many as cores.
LARGE_MACHINE = 16
# A burst this far from its prediction (as a log-ratio) is run again before either is believed.
SURPRISE = 0.15
# Steps shorter than this differ by scheduling alone.
STEP_RESOLUTION_S = 0.0005
# Search ends when the expected gain of the best untried configuration is below this share of the tolerance.
WORTHWHILE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What is believed of one configuration, in samples/s."""

    config: LoaderConfig
    samples_per_s: float
    """Posterior median."""
    log_sd: float
    """Posterior standard deviation of its logarithm."""
    twin_samples_per_s: float
    """What the twin alone says."""

    def expected_gain(self, incumbent: float) -> float:
        """Expected relative improvement over a rate (Jones, Schonlau and Welch 1998, on the log scale)."""
        distance = math.log(self.samples_per_s / incumbent)
        if self.log_sd <= 0:
            return max(0.0, distance)
        z = distance / self.log_sd
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return distance * 0.5 * math.erfc(-z / math.sqrt(2)) + self.log_sd * density


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinInputs:
    """What the twin needs besides the trials."""

    usable_cores: int
    consumer_cores: float
    """Cores that the step keeps busy: its intra-op threads on a CPU, 1 where it only feeds an accelerator."""
    step_s_by_threads: dict[int | None, float]
    """Seconds of the step on a cached batch, by `consumer_threads`."""
    epoch_batches: int | None = None


def scouts(space: Space, usable_cores: int) -> tuple[LoaderConfig, ...]:
    """The bursts that the twin is fitted to, where the space has them.

    No worker, one, as many as there are cores, and on large machines a quarter: contention need not be monotone, and a fit
    through both ends cannot know. Where the step's threads are a knob, each count with the cores it leaves as workers: that
    split is often the best, and how a parallel step bears workers shows in no other burst.
    """
    quarter = (usable_cores // 4,) if usable_cores >= LARGE_MACHINE else ()
    wanted: list[tuple[int, int | None]] = [(workers, None) for workers in (0, 1, *quarter, usable_cores)]
    wanted += [(max(1, usable_cores - threads), threads) for threads in space.consumer_threads if threads is not None]
    nearest = (_nearest(space, workers, threads) for workers, threads in wanted)
    return tuple(dict.fromkeys(config for config in nearest if config is not None))


def _nearest(space: Space, workers: int, threads: int | None) -> LoaderConfig | None:
    """The legal configuration with these threads and torch's prefetch that comes closest to so many workers."""
    legal = [config for config in space.configs() if config.consumer_threads == threads and config.in_order]
    plain = [config for config in legal if config.prefetch_factor in (None, TORCH_PREFETCH_FACTOR)] or legal
    return min(plain, key=lambda config: abs(config.num_workers - workers), default=None)


def fit_twin(trials: Sequence[Trial], inputs: TwinInputs, seed: int = 0) -> Twin | None:
    """The twin of all successful trials; None before there is any."""
    observations = [
        Observation.from_measurement(trial.config, trial.measurement)
        for trial in trials
        if trial.measurement is not None and trial.config.batch_size is None
    ]
    if not observations:
        return None
    return Twin.fit(
        observations,
        cores=inputs.usable_cores,
        consumer_cores=inputs.consumer_cores,
        step_s_by_threads=inputs.step_s_by_threads,
        seed=seed,
    )


def beliefs(space: Space, trials: Sequence[Trial], inputs: TwinInputs, seed: int = 0) -> list[Belief]:
    """What is believed of every legal configuration and every one tried; empty before anything was measured."""
    twin = fit_twin(trials, inputs, seed)
    if twin is None:
        return []
    tried = {modelled(trial.config): trial for trial in trials if trial.measurement is not None}
    failed = {modelled(trial.config) for trial in trials if trial.failure is not None} - set(tried)
    configs = list(dict.fromkeys([*map(modelled, space.configs()), *tried]))
    configs = [config for config in configs if config not in failed]
    predicted = dict(zip(configs, twin.predict_all(configs), strict=True))
    measured = [config for config in configs if config in tried]
    twin_rates = {config: predicted[config].samples_per_s.value for config in configs}
    mean, sd = _posterior(configs, measured, tried, twin_rates, inputs.consumer_cores)
    return [
        Belief(
            config=config,
            samples_per_s=predicted[config].samples_per_s.value * math.exp(shift),
            log_sd=float(spread),
            twin_samples_per_s=predicted[config].samples_per_s.value,
        )
        for config, shift, spread in zip(configs, mean, sd, strict=True)
    ]


def next_config(
    space: Space, trials: Sequence[Trial], inputs: TwinInputs, tolerance: float, seed: int = 0
) -> Belief | None:
    """The untried configuration with the largest expected gain; None when no gain is worth a burst."""
    known = beliefs(space, trials, inputs, seed)
    tried = {modelled(trial.config) for trial in trials}
    incumbent = max((belief.samples_per_s for belief in known if belief.config in tried), default=None)
    untried = [belief for belief in known if belief.config not in tried]
    if incumbent is None or not untried:
        return None
    best = max(untried, key=lambda belief: (round(belief.expected_gain(incumbent), 4), -belief.config.num_workers))
    return best if best.expected_gain(incumbent) > WORTHWHILE_SHARE * tolerance else None


def finalists(
    known: Sequence[Belief], trials: Sequence[Trial], space: Space, tolerance: float, most: int = 4
) -> list[LoaderConfig]:
    """The few configurations that deserve fresh rounds: the fastest believed, predicted and measured, and the cheapest as fast.

    Args:
        known: beliefs after the search.
        trials: what was measured; a model that is wrong about the fastest must not keep it out.
        space: tells what memory a configuration needs.
        tolerance: relative difference that counts as equally fast.
        most: how many at most.
    """
    if not known:
        return []
    fastest = max(known, key=lambda belief: belief.samples_per_s)
    near = [belief for belief in known if belief.samples_per_s >= fastest.samples_per_s * (1 - tolerance / 2)]
    cheapest = min(near, key=lambda belief: (cost(belief.config, space), -belief.samples_per_s))
    predicted = max(known, key=lambda belief: belief.twin_samples_per_s)
    measured = max((t for t in trials if t.measurement is not None), key=lambda trial: trial.samples_per_s or 0.0)
    chosen = (fastest.config, cheapest.config, predicted.config, modelled(measured.config))
    return list(dict.fromkeys(chosen))[:most]


def is_surprising(config: LoaderConfig, measurement: Measurement, predicted: float | None, inputs: TwinInputs) -> bool:
    """Whether a burst disagrees with the twin so much that one of the two was disturbed or is wrong.

    Without workers nothing shares the cores with the step, so there it is compared with itself on a cached batch.
    """
    undisturbed_s = inputs.step_s_by_threads.get(config.consumer_threads)
    if config.num_workers == 0 and undisturbed_s:
        return measurement.step_s > undisturbed_s * math.exp(SURPRISE) + STEP_RESOLUTION_S
    rate = measurement.samples_per_s.value
    return bool(predicted) and rate > 0 and abs(math.log(rate / (predicted or rate))) > SURPRISE


def cost(config: LoaderConfig, space: Space) -> tuple[float, ...]:
    """What a configuration costs, most important first: workers, then the memory they need, then odd settings."""
    oddities = (config.consumer_threads is not None) + config.pin_memory + (not config.in_order)
    return (config.num_workers, space.memory_need(config), config.device_prefetch, oddities)


def modelled(config: LoaderConfig) -> LoaderConfig:
    """The configuration without what no burst can see."""
    return replace(config, persistent_workers=False)


def _posterior(
    configs: Sequence[LoaderConfig],
    measured: Sequence[LoaderConfig],
    tried: dict[LoaderConfig, Trial],
    twin: dict[LoaderConfig, float],
    default_threads: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd of ln(rate / twin's rate) at every configuration: Gaussian process regression on the residuals.

    Rasmussen and Williams 2006, algorithm 2.1, with a squared exponential kernel.
    """
    prior = MODEL_SD**2 * _kernel(configs, configs, default_threads)
    if not measured:
        return np.zeros(len(configs)), np.sqrt(np.diag(prior))
    residual = np.array([math.log((tried[c].samples_per_s or twin[c]) / twin[c]) for c in measured])
    noise = np.array([_burst_variance(tried[c]) for c in measured])
    cross = MODEL_SD**2 * _kernel(configs, measured, default_threads)
    within = MODEL_SD**2 * _kernel(measured, measured, default_threads) + np.diag(noise)
    factor = np.linalg.cholesky(within)
    mean = cross @ np.linalg.solve(factor.T, np.linalg.solve(factor, residual))
    explained = np.linalg.solve(factor, cross.T)
    return mean, np.sqrt(np.maximum(np.diag(prior) - np.sum(explained**2, axis=0), 1e-8))


def _burst_variance(trial: Trial) -> float:
    assert trial.measurement is not None
    rate = trial.measurement.samples_per_s
    half = (rate.high - rate.low) / 2 / rate.value if rate.value > 0 and math.isfinite(rate.high) else 0.2
    return float((half / 1.96) ** 2 + BURST_SD**2)


def _kernel(a: Sequence[LoaderConfig], b: Sequence[LoaderConfig], default_threads: float) -> np.ndarray:
    left, right = _features(a, default_threads), _features(b, default_threads)
    distance = ((left[:, None, :] - right[None, :, :]) / LENGTH_SCALE) ** 2
    similarity: np.ndarray = np.exp(-0.5 * distance.sum(axis=2))
    return similarity


def _features(configs: Sequence[LoaderConfig], default_threads: float) -> np.ndarray:
    """Coordinates in doublings: what doubles a knob moves a configuration by one."""
    return np.array(
        [
            (
                math.log2(config.num_workers + 0.5),
                0.5 * math.log2(config.prefetch_factor or 1),
                math.log2(config.consumer_threads or default_threads),
                2.0 * config.pin_memory + config.device_prefetch,
                2.0 * (not config.in_order) + math.log2(config.batch_size or 1),
            )
            for config in configs
        ]
    )
