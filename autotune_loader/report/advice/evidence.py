"""What a verdict rests on, and the figures that verdict and advice draw from it. Pure functions of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune_loader.decision.space import Space
from autotune_loader.report.advice.limits import MIN_BATCHES, Limit, cpu_limit
from autotune_loader.twin import Prediction, Twin
from autotune_loader.twin.memory import MemoryModel
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig
from autotune_loader.values.measurement import FailureKind, Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Acceleration, Trial

# A slow tail is judged from at least so many batches.
MIN_TAIL_BATCHES = 20
MEMORY_FAILURES: tuple[FailureKind, ...] = ("memory_guard", "oom_killed", "out_of_memory", "shared_memory")
# A configuration that failed for want of memory would have had to be this much faster to be missed.
MISSED_GAIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a verdict rests on."""

    best: LoaderConfig
    measurement: Measurement
    rate: Interval
    ceiling: Interval | None
    usable_cores: int
    on_accelerator: bool
    epoch_batches: int | None
    trials: Sequence[Trial]
    has_batched_fetch: bool
    twin: Twin | None = None
    cached_steps: Sequence[Measurement] = ()
    """The step on a cached batch, with any number of threads."""
    space: Space | None = None
    """What could have been tried, and the limits of this machine."""
    accelerations: Sequence[Acceleration] = ()
    """What allowed changes of the step would bring, where that was measured."""

    @property
    def period_s(self) -> float:
        """Seconds of one round of the training loop at the measured rate."""
        return self.measurement.batch_size / self.rate.value


def measured_trials(evidence: Evidence) -> list[tuple[LoaderConfig, Measurement]]:
    """Every configuration that worked, with its burst; the best one's own where no trial is given."""
    worked = [(trial.config, trial.measurement) for trial in evidence.trials if trial.measurement is not None]
    return worked or [(evidence.best, evidence.measurement)]


def calmest(evidence: Evidence) -> Measurement:
    """The burst with the fewest workers: there a worker that waits does so for its data and not for a core."""
    return min(measured_trials(evidence), key=lambda each: each[0].num_workers)[1]


def computing_share(evidence: Evidence) -> float:
    """Share of a fetch that is spent on a CPU, where nothing else wants it; above 1 where a fetch uses several cores."""
    burst = calmest(evidence)
    return burst.service_cpu_s / burst.service_s if burst.service_s > 0 else 1.0


def cores_per_worker(evidence: Evidence) -> float:
    """Cores that one worker keeps busy while it fetches: above 1 its libraries start threads of their own."""
    shares = [
        burst.service_cpu_s / burst.service_s
        for config, burst in measured_trials(evidence)
        if config.num_workers and burst.service_s > 0
    ]
    return max(shares, default=0.0)


def cores_limit(evidence: Evidence) -> Limit | None:
    """What the cores allow: fetch and, on a CPU, the step."""
    bursts = [burst for _, burst in measured_trials(evidence)]
    return cpu_limit(bursts, evidence.usable_cores, () if evidence.on_accelerator else evidence.cached_steps)


def receive_s(measurement: Measurement) -> float:
    """Seconds in which the loop takes over a batch that lies ready; 0 where most had to be waited for."""
    if not measurement.traces:
        return measurement.receive_s
    ready = [trace.receive_s for trace in measurement.traces[1:] if trace.collate_end <= trace.requested]
    return statistics.median(ready) if len(ready) >= max(MIN_BATCHES, len(measurement.traces) // 2) else 0.0


def hand_over_s(evidence: Evidence) -> float:
    """Seconds that a batch costs more when a worker makes it: taking it over, and writing it into shared memory.

    The latter is what a batch takes longer in one worker than in the training process.
    """
    taken = [burst for config, burst in measured_trials(evidence) if config.num_workers]
    if not taken:
        return 0.0
    alone = [burst for config, burst in measured_trials(evidence) if config.num_workers == 1]
    here = [burst for config, burst in measured_trials(evidence) if config.num_workers == 0]
    written_s = max(0.0, _least_service_s(alone) - _least_service_s(here)) if alone and here else 0.0
    return written_s + max(receive_s(burst) for burst in taken)


def _least_service_s(bursts: Sequence[Measurement]) -> float:
    return min(burst.service_s for burst in bursts)


def collate_share(measurement: Measurement) -> float | None:
    """Share of a fetch that goes into collating; None without traces."""
    whole = sum(trace.service_s for trace in measurement.traces)
    if whole <= 0:
        return None
    return sum(trace.collate_end - trace.fetch_end for trace in measurement.traces) / whole


def tail(measurement: Measurement) -> float:
    """Slowest of a hundred batches over the median one."""
    services = sorted(trace.service_s for trace in measurement.traces)
    if len(services) < MIN_TAIL_BATCHES or services[len(services) // 2] <= 0:
        return 1.0
    return services[min(len(services) - 1, int(len(services) * 0.99))] / services[len(services) // 2]


def startup_share(evidence: Evidence) -> float:
    """Share of an epoch that worker start-up takes, where workers are not kept."""
    if not evidence.epoch_batches or evidence.best.persistent_workers or evidence.best.num_workers == 0:
        return 0.0
    epoch_s = evidence.epoch_batches * evidence.period_s
    starting_s = max(0.0, evidence.measurement.first_batch_s - evidence.measurement.service_s)
    return starting_s / (starting_s + epoch_s)


def loaders_gain(evidence: Evidence) -> float | None:
    """Relative gain that the workers could keep up with, by what they fetched in any burst; None without workers."""
    rates = [
        config.num_workers * burst.batch_size / burst.service_s
        for config, burst in measured_trials(evidence)
        if config.num_workers and burst.service_s > 0
    ]
    return max(rates) / evidence.rate.value - 1 if rates else None


def stopped_by_memory(evidence: Evidence) -> list[Trial]:
    """Trials with more workers or a deeper queue that ran out of memory, and might have been faster."""
    failed = [t for t in evidence.trials if t.failure is not None and t.failure.kind in MEMORY_FAILURES]
    larger = [trial for trial in failed if _batches_held(trial.config) > _batches_held(evidence.best)]
    gains = [missed_gain(evidence, trial) for trial in larger]
    return [trial for trial, gain in zip(larger, gains, strict=True) if gain is None or gain > MISSED_GAIN]


def missed_gain(evidence: Evidence, failed: Trial) -> float | None:
    """Relative gain that a failed trial's configuration would have brought; None where nobody can say."""
    now = predicted_gain(evidence, failed.config)
    if now is None and failed.predicted_samples_per_s is not None:
        return failed.predicted_samples_per_s / evidence.rate.value - 1
    return now


def _batches_held(config: LoaderConfig) -> int:
    return config.num_workers * (config.prefetch_factor or 1)


def memory_model(evidence: Evidence) -> MemoryModel | None:
    """What configurations take; None where no burst tells."""
    return MemoryModel.fit(measured_trials(evidence))


def worker_bytes(evidence: Evidence) -> float | None:
    """Memory that one more worker takes, its queue included, from bursts with different numbers of them; None without two."""
    model = memory_model(evidence)
    if model is None or model.worker_bytes is None:
        return None
    return model.worker_bytes + (evidence.best.prefetch_factor or TORCH_PREFETCH_FACTOR) * model.batch_bytes


def predicted(evidence: Evidence, config: LoaderConfig, cores: float | None = None) -> Prediction | None:
    """What the twin says of another configuration or machine; None without a twin."""
    return None if evidence.twin is None else evidence.twin.predict_all([config], cores=cores)[0]


def predicted_gain(evidence: Evidence, config: LoaderConfig, cores: float | None = None) -> float | None:
    """Relative gain over the best configuration as it is, both as the twin has them; None without a twin."""
    now, then = predicted(evidence, evidence.best), predicted(evidence, config, cores)
    if now is None or then is None or now.samples_per_s.value <= 0:
        return None
    return then.samples_per_s.value / now.samples_per_s.value - 1
