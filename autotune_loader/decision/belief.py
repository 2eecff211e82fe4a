"""From the trials to what is believed of every configuration.

    trials ──► twin (queues and cores) ──► prior of every rate ──► posterior, corrected by every measured rate

Pure functions of the trials: no clock, no Optuna, no process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.decision.posterior import Posterior, consumer_bound, prior_covariance
from autotune_loader.decision.selection import modelled
from autotune_loader.decision.space import Space
from autotune_loader.decision.sufficiency import Sufficiency
from autotune_loader.twin import Observation, Twin
from autotune_loader.twin.prediction import Prediction
from autotune_loader.twin.queue import Floats
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Z_95
from autotune_loader.values.trial import Trial

# A burst this much slower than predicted (as a log-ratio) is run again before it is believed.
SUSPICIOUS_SLOWDOWN = 0.15
# Steps shorter than this differ by scheduling alone.
STEP_RESOLUTION_S = 0.0005
# Relative standard deviation of a burst whose few batches give no better interval, or none: so far do bursts of real workloads
# scatter on a busy machine (finals in studies/regret/results: 7 % to 12 % as a rule, 20 % beside neighbours). With more, what
# only ever had slow bursts was taken for what the twin made of it.
POOREST_BURST_SD = 0.2
# Processes of others that take a share of the cores in one burst take anything from none to twice as much in the next, so that
# rates differ by so much of that share (relative standard deviation). On a quiet machine others take 0.1 % to 0.4 %.
NEIGHBOURS_SD = 0.5
# A step that keeps fewer cores busy than this gains nothing from another number of threads, and bears any workers.
CORES_OF_A_SERIAL_STEP = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinInputs:
    """What the twin needs besides the trials."""

    usable_cores: int
    consumer_cores: float
    """Cores that the step keeps busy: its intra-op threads on a CPU, 1 where it only feeds an accelerator."""
    step_s_by_threads: dict[int | None, float]
    """Seconds of the step on a cached batch, by `consumer_threads`."""


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


def learn(space: Space, trials: Sequence[Trial], inputs: TwinInputs, seed: int = 0) -> Posterior | None:
    """What is believed of every legal configuration and every one tried; None before anything was measured."""
    # Variants in what the twin knows nothing of are compared by their rates alone.
    trials = [trial for trial in trials if space.is_modelled(trial.config)]
    twin = fit_twin(trials, inputs, seed)
    if twin is None:
        return None
    measured = [(modelled(trial.config), trial.measurement) for trial in trials if trial.measurement is not None]
    tried = dict.fromkeys(config for config, _ in measured)
    failed = {modelled(trial.config) for trial in trials if trial.failure is not None} - set(tried)
    configs = [c for c in dict.fromkeys([*map(modelled, space.modelled_configs()), *tried]) if c not in failed]
    predictions = twin.predict_all(configs)
    predicted = [prediction.samples_per_s.value for prediction in predictions]
    before = Posterior(
        configs=tuple(configs),
        mean=np.log(np.maximum(predicted, 1e-12)),
        covariance=prior_covariance(configs, inputs.consumer_cores, _bound_by_consumer(predictions, twin, inputs)),
        noise_sd=twin.calibration.noise_sd,
        sufficiency=Sufficiency.of(
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
    known: Posterior,
    space: Space,
    trials: Sequence[Trial],
    inputs: TwinInputs,
    *,
    epoch_batches: int,
    as_run: Callable[[LoaderConfig], LoaderConfig],
    seed: int = 0,
) -> Posterior:
    """What is believed of whole epochs: the steady rates, by what the twin says that queues filling anew and start-up take.

    `as_run` tells of a configuration how it will be trained with: whether its workers persist.
    """
    twin = fit_twin([trial for trial in trials if space.is_modelled(trial.config)], inputs, seed)
    if twin is None:
        return known
    predictions = twin.predict_all([as_run(config) for config in known.configs], epoch_batches=epoch_batches)
    shares = [each.epoch_samples_per_s / each.samples_per_s.value for each in predictions]
    # Few workers that feed the loop in the long run take longer to begin each epoch.
    return replace(known, mean=known.mean + np.log(np.maximum(shares, 1e-12)), sufficiency=None)


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


def _burst_variance(measurement: Measurement, twin: Twin, scatter: float) -> float:
    """Of the logarithm of a burst's rate: what its own interval says, noise between bursts, neighbours, unseen slow batches."""
    rate = measurement.samples_per_s
    own_sd = min(math.log(rate.high / rate.value) / Z_95, POOREST_BURST_SD)
    tails = twin.calibration.contention.variability / max(rate.count, 1) * measurement.wait_share**2
    neighbours_sd = NEIGHBOURS_SD * (measurement.foreign_cpu_share or 0.0)
    return float(max(own_sd**2, tails) + scatter**2 + twin.calibration.noise_sd**2 + neighbours_sd**2)
