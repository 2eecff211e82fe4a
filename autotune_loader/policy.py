"""Which configuration to try next, and when nothing is worth trying: the twin's predictions, corrected by what was measured.

    scouts ──► twin ──► posterior = twin + smooth residual of the measurements ──► the burst that teaches most
                 ▲                                                                          │
                 └────────────────────── burst ◄────────────────────────────────────────────┘

The twin knows queues and cores; the residual, a small Gaussian process over (workers, prefetch, threads), takes up what it
gets wrong, so that a wrong twin cannot trap the search. Pure functions of the trials: no clock, no Optuna, no process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.config import TORCH_PREFETCH_FACTOR, LoaderConfig
from autotune_loader.space import Space
from autotune_loader.stats import Z_95
from autotune_loader.trial import Measurement, Trial
from autotune_loader.twin import Observation, Twin
from autotune_loader.twin.feeding import Feeding
from autotune_loader.twin.prediction import Prediction
from autotune_loader.twin.recursion import Floats
from autotune_loader.twin.residual import Knowledge, consumer_bound, prior_covariance

# From so many cores on, a scout stands between one worker and as many as cores.
LARGE_MACHINE = 16
# A burst this much slower than predicted (as a log-ratio) is run again before it is believed.
SUSPICIOUS_SLOWDOWN = 0.15
# Steps shorter than this differ by scheduling alone.
STEP_RESOLUTION_S = 0.0005
# Search ends when a burst of no configuration is expected to gain more than this share of the tolerance.
WORTHWHILE_SHARE = 0.4
# Relative standard deviation of a burst whose few batches give no better interval, or none: so far do bursts of real workloads
# scatter on a busy machine (finals in studies/regret/results: 7 % to 12 % as a rule, 20 % beside neighbours). With more, what
# only ever had slow bursts was taken for what the twin made of it.
POOREST_BURST_SD = 0.2
# Processes of others that take a share of the cores in one burst take anything from none to twice as much in the next, so that
# rates differ by so much of that share (relative standard deviation). On a quiet machine others take 0.1 % to 0.4 %.
NEIGHBOURS_SD = 0.5
# Share of the memory limit that makes one configuration dearer than another.
MEMORY_STEP = 0.05
# A step that keeps fewer cores busy than this gains nothing from another number of threads, and bears any workers.
CORES_OF_A_SERIAL_STEP = 1.3
# Of finalists that leave this much of the tolerance more to be lost than the best of them, the cheapest is taken.
RIVAL_SHARE = 0.1
# A further finalist must be expected to save this share of the tolerance.
FINALIST_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinInputs:
    """What the twin needs besides the trials."""

    usable_cores: int
    consumer_cores: float
    """Cores that the step keeps busy: its intra-op threads on a CPU, 1 where it only feeds an accelerator."""
    step_s_by_threads: dict[int | None, float]
    """Seconds of the step on a cached batch, by `consumer_threads`."""


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
    legal = [config for config in space.plain_configs() if config.consumer_threads == threads and config.in_order]
    plain = [config for config in legal if config.prefetch_factor in (None, TORCH_PREFETCH_FACTOR)] or legal
    return min(plain, key=lambda config: abs(config.num_workers - workers), default=None)


def fit_twin(trials: Sequence[Trial], inputs: TwinInputs, seed: int = 0) -> Twin | None:
    """The twin of all successful trials; None before there is any."""
    # Each burst of the search reads other samples, so that no page cache flatters it: positions tell nothing in common.
    observations = [
        replace(Observation.from_measurement(trial.config, trial.measurement), positions=())
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


def learn(space: Space, trials: Sequence[Trial], inputs: TwinInputs, seed: int = 0) -> Knowledge | None:
    """What is believed of every legal configuration and every one tried; None before anything was measured."""
    # Variants in what the twin knows nothing of are compared by their rates alone.
    trials = [trial for trial in trials if space.is_plain(trial.config)]
    twin = fit_twin(trials, inputs, seed)
    if twin is None:
        return None
    measured = [(modelled(trial.config), trial.measurement) for trial in trials if trial.measurement is not None]
    tried = dict.fromkeys(config for config, _ in measured)
    failed = {modelled(trial.config) for trial in trials if trial.failure is not None} - set(tried)
    configs = [c for c in dict.fromkeys([*map(modelled, space.plain_configs()), *tried]) if c not in failed]
    predictions = twin.predict_all(configs)
    predicted = [prediction.samples_per_s.value for prediction in predictions]
    before = Knowledge(
        configs=tuple(configs),
        mean=np.log(np.maximum(predicted, 1e-12)),
        covariance=prior_covariance(configs, inputs.consumer_cores, _bound_by_consumer(predictions, twin, inputs)),
        noise_sd=twin.calibration.noise_sd,
        feeding=Feeding.of(
            configs,
            twin.observations,
            [prediction.consumer_use for prediction in predictions],
            cores=None if _shares_cores(inputs) else inputs.usable_cores,
        ),
    )
    where = {config: index for index, config in enumerate(configs)}
    usable = [(config, burst) for config, burst in measured if burst.samples_per_s.value > 0]
    scatter = twin.burst_scatter([(config, burst.samples_per_s.count) for config, burst in usable])
    bursts = (
        [where[config] for config, _ in usable],
        [math.log(burst.samples_per_s.value) for _, burst in usable],
        [_burst_variance(burst, twin, float(sd)) for (_, burst), sd in zip(usable, scatter, strict=True)],
    )
    return before.without_flattered_queues().scaled(*bursts).updated(*bursts)


def _bound_by_consumer(predictions: Sequence[Prediction], twin: Twin, inputs: TwinInputs) -> Floats:
    """How far the consumer sets each rate; not at all where it shares the cores with the workers, who slow it down."""
    if _shares_cores(inputs):
        return np.zeros(len(predictions))
    headroom = [prediction.headroom for prediction in predictions]
    return consumer_bound(headroom, [prediction.consumer_use for prediction in predictions], twin.variation)


def _shares_cores(inputs: TwinInputs) -> bool:
    """Whether the step computes on the cores of the workers, who slow it down."""
    return inputs.consumer_cores > CORES_OF_A_SERIAL_STEP


def over_epochs(
    known: Knowledge,
    space: Space,
    trials: Sequence[Trial],
    inputs: TwinInputs,
    *,
    epoch_batches: int,
    as_run: Callable[[LoaderConfig], LoaderConfig],
    seed: int = 0,
) -> Knowledge:
    """What is believed of whole epochs: the steady rates, by what the twin says that queues filling anew and start-up take.

    `as_run` tells of a configuration how it will be trained with: whether its workers persist.
    """
    twin = fit_twin([trial for trial in trials if space.is_plain(trial.config)], inputs, seed)
    if twin is None:
        return known
    predictions = twin.predict_all([as_run(config) for config in known.configs], epoch_batches=epoch_batches)
    shares = [each.epoch_samples_per_s / each.samples_per_s.value for each in predictions]
    # Few workers that feed the loop in the long run take longer to begin each epoch.
    return replace(known, mean=known.mean + np.log(np.maximum(shares, 1e-12)), feeding=None)


def choose(known: Knowledge, space: Space, tolerance: float) -> tuple[LoaderConfig, bool]:
    """The cheapest configuration that is expected to lose hardly more than any must, and whether it is safe."""
    index, safe = known.choice([cost(config, space) for config in known.configs], tolerance)
    return known.configs[index], safe


def next_config(known: Knowledge, space: Space, trials: Sequence[Trial], tolerance: float) -> LoaderConfig | None:
    """The untried configuration of which a burst teaches most; None when the choice is safe or no burst is worth it."""
    chosen, safe = choose(known, space, tolerance)
    if safe:
        return None
    tried = {modelled(trial.config) for trial in trials}
    gains = known.information_gain(known.configs.index(chosen))
    untried = [index for index, config in enumerate(known.configs) if config not in tried]
    best = max(untried, key=lambda i: (round(float(gains[i]), 4), -known.configs[i].num_workers), default=None)
    if best is None or gains[best] <= WORTHWHILE_SHARE * tolerance:
        return None
    return known.configs[best]


def finalists(known: Knowledge, space: Space, tolerance: float, most: int = 2) -> list[LoaderConfig]:
    """The few configurations that deserve fresh rounds: the choice, and those that may well be what it misses.

    Each further one leaves hardly more to be lost than any must, when the best of them all is taken; of such the cheapest.
    """
    chosen, _ = choose(known, space, tolerance)
    short = known.shortfalls()
    taken = [known.configs.index(chosen)]
    left = short[:, taken[0]]
    while len(taken) < most:
        losses = np.minimum(left[:, None], short).mean(axis=0)
        enough = np.flatnonzero(losses <= losses.min() + RIVAL_SHARE * tolerance)
        best = min(map(int, enough), key=lambda i: (cost(known.configs[i], space), losses[i]))
        if left.mean() - losses[best] < FINALIST_SHARE * tolerance:
            break
        taken.append(best)
        left = np.minimum(left, short[:, best])
    return [known.configs[index] for index in taken]


def looks_disturbed(
    config: LoaderConfig, measurement: Measurement, predicted: float | None, inputs: TwinInputs
) -> bool:
    """Whether a burst is so much slower than expected that it was disturbed, or the twin is wrong.

    What is faster than expected was not disturbed. Without workers nothing shares the cores with the step, so there it is
    compared with itself on a cached batch.
    """
    undisturbed_s = inputs.step_s_by_threads.get(config.consumer_threads)
    if config.batch_size is not None:  # another step, on other batches
        return False
    if config.num_workers == 0 and undisturbed_s:
        return measurement.step_s > undisturbed_s * math.exp(SUSPICIOUS_SLOWDOWN) + STEP_RESOLUTION_S
    rate = measurement.samples_per_s.value
    return predicted is not None and 0 < rate < predicted * math.exp(-SUSPICIOUS_SLOWDOWN)


def cost(config: LoaderConfig, space: Space) -> tuple[float, ...]:
    """What a configuration costs, most important first: other batches to train on, workers, their memory, odd settings."""
    other_batches = (config.batch_size is not None) + (config.drop_last is not None)
    oddities = (config.consumer_threads is not None) + config.pin_memory + (not config.in_order)
    oddities += (config.sharing_strategy is not None) + (not space.is_plain(config))
    memory = space.memory_need(config)
    if space.limits.memory_bytes:
        memory = int(memory / space.limits.memory_bytes / MEMORY_STEP)
    # Where memory is no matter, a deeper queue is hardly ever slower, and it evens out the slow batches that no burst has seen.
    depth = -(config.prefetch_factor or 0)
    return (other_batches, config.num_workers, memory, config.device_prefetch, oddities, depth)


def modelled(config: LoaderConfig) -> LoaderConfig:
    """The configuration without what no burst can see."""
    return replace(config, persistent_workers=False)


def _burst_variance(measurement: Measurement, twin: Twin, scatter: float) -> float:
    """Of the logarithm of a burst's rate: what its own interval says, noise between bursts, neighbours, unseen slow batches."""
    rate = measurement.samples_per_s
    own_sd = min(math.log(rate.high / rate.value) / Z_95, POOREST_BURST_SD)
    tails = twin.calibration.contention.variability / max(rate.count, 1) * measurement.wait_share**2
    neighbours_sd = NEIGHBOURS_SD * (measurement.foreign_cpu_share or 0.0)
    return float(max(own_sd**2, tails) + scatter**2 + twin.calibration.noise_sd**2 + neighbours_sd**2)
