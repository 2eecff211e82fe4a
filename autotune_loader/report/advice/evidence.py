"""What a verdict rests on, and the figures that verdict and advice draw from it. Pure functions of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune_loader.decision.space import Space
from autotune_loader.pipeline.held_objects import HeldObjects
from autotune_loader.twin import Prediction, Twin
from autotune_loader.twin.memory import MemoryModel
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT, Interval
from autotune_loader.values.trial import Trial

MIN_BATCHES = 4
"""Fewer batches say nothing of a mean."""
# With more workers, and batches that lie ready, a rate that is higher by less than this is the same.
FED_GAIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a verdict rests on."""

    best: LoaderConfig
    measurement: Measurement
    rate: Interval
    ceiling: Interval | None
    """None also where something speaks against it; then `ceiling_doubt` says what."""
    usable_cores: int
    on_accelerator: bool
    epoch_batches: int | None
    trials: Sequence[Trial]
    has_batched_fetch: bool
    ceiling_doubt: str | None = None
    twin: Twin | None = None
    space: Space | None = None
    """What could have been tried, and the limits of this machine."""
    stage_times: Sequence[StageTime] = ()
    """Where the time of a sample goes in a worker, the longest stage first."""
    held: HeldObjects | None = None
    """The largest list of Python objects that the dataset holds."""

    @property
    def period_s(self) -> float:
        """Seconds of one round of the training loop at the measured rate."""
        return self.measurement.batch_size / self.rate.value

    def fetching_share(self) -> float:
        """Share of its time in which a worker of the best configuration fetches; 1 without workers."""
        workers = self.best.num_workers
        return min(1.0, self.measurement.service_s / (workers * self.period_s)) if workers else 1.0

    def measured_trials(self) -> list[tuple[LoaderConfig, Measurement]]:
        """Every configuration that worked, with its burst; the best one's own where no trial is given."""
        worked = [(trial.config, trial.measurement) for trial in self.trials if trial.measurement is not None]
        return worked or [(self.best, self.measurement)]

    def computing_share(self) -> float:
        """Share of a fetch that is spent on a CPU, where nothing else wants it; above 1 where a fetch uses several cores."""
        burst = self.telling_burst()
        return burst.service_cpu_s / burst.service_s if burst.service_s > 0 else 1.0

    def telling_burst(self) -> Measurement:
        """The burst with the fewest workers and a quiet machine: there a worker that waits does so for its data, not a core.

        Where the machine was never quiet, the one in which fetches had the CPU for most of their time.
        """
        bursts = self.measured_trials()
        quiet = [each for each in bursts if (each[1].foreign_cpu_share or 0.0) <= FOREIGN_CPU_LIMIT]
        if quiet:
            return min(quiet, key=lambda each: each[0].num_workers)[1]
        return max((burst for _, burst in bursts), key=lambda each: each.service_cpu_s / max(each.service_s, 1e-9))

    def idle_share(self) -> float | None:
        """Share of the cores that nobody used during that burst: what a fetch did not wait for; None without a meter."""
        burst = self.telling_burst()
        if burst.cpu_share is None or burst.foreign_cpu_share is None:
            return None
        return max(0.0, 1 - burst.cpu_share - burst.foreign_cpu_share)

    def fed_burst(self) -> Measurement | None:
        """A burst with more workers, most of whose batches lay ready, and which was no faster: its loop waited for no fetch."""
        more = [
            burst
            for config, burst in self.measured_trials()
            if config.num_workers > self.best.num_workers and config.batch_size == self.best.batch_size
        ]
        if any(burst.samples_per_s.value > (1 + FED_GAIN) * self.rate.value for burst in more):
            return None
        return max((burst for burst in more if receive_s(burst) > 0), key=receive_s, default=None)

    def cores_per_worker(self) -> float:
        """Cores that one worker keeps busy while it fetches: above 1 its libraries start threads of their own."""
        shares = [
            burst.service_cpu_s / burst.service_s
            for config, burst in self.measured_trials()
            if config.num_workers and burst.service_s > 0
        ]
        return max(shares, default=0.0)

    def hand_over_s(self) -> float:
        """Seconds that a batch costs more when a worker makes it: taking it over, and writing it into shared memory.

        The latter is what a batch takes longer in one worker than in the training process.
        """
        bursts = self.measured_trials()
        taken_s = max((receive_s(burst) for config, burst in bursts if config.num_workers), default=0.0)
        alone_s = min((burst.service_s for config, burst in bursts if config.num_workers == 1), default=0.0)
        here_s = min((burst.service_s for config, burst in bursts if config.num_workers == 0), default=alone_s)
        return taken_s + max(0.0, alone_s - here_s)

    def startup_share(self) -> float:
        """Share of an epoch that worker start-up takes, where workers are not kept."""
        if not self.epoch_batches or self.best.persistent_workers or self.best.num_workers == 0:
            return 0.0
        epoch_s = self.epoch_batches * self.period_s
        starting_s = max(0.0, self.measurement.first_batch_s - self.measurement.service_s)
        return starting_s / (starting_s + epoch_s)

    def memory_model(self) -> MemoryModel | None:
        """What configurations take; None where no burst tells."""
        return MemoryModel.fit(self.measured_trials())

    def worker_bytes(self) -> float | None:
        """Memory that one more worker takes, its queue included; None without bursts of different numbers of workers."""
        model = self.memory_model()
        if model is None or model.worker_bytes is None:
            return None
        return model.worker_bytes + (self.best.prefetch_factor or TORCH_PREFETCH_FACTOR) * model.batch_bytes_of(
            self.best
        )

    def predicted(self, config: LoaderConfig, cores: float | None = None) -> Prediction | None:
        """What the twin says of another configuration or machine; None without a twin."""
        return None if self.twin is None else self.twin.predict_all([config], cores=cores)[0]

    def predicted_gain(
        self, config: LoaderConfig | None = None, cores: float | None = None, *, twin: Twin | None = None
    ) -> float | None:
        """Relative gain over the best configuration as it is; None without a twin.

        Args:
            config: the best one if None.
            cores: those of the machine if None.
            twin: what predicts it where something else is changed; the best as it is is always the job's own twin's.
        """
        now = self.predicted(self.best)
        if self.twin is None or now is None or now.samples_per_s.value <= 0:
            return None
        then = (twin or self.twin).predict_all([config or self.best], cores=cores)[0]
        return then.samples_per_s.value / now.samples_per_s.value - 1


def receive_s(measurement: Measurement) -> float:
    """Seconds in which the loop takes over a batch that lies ready; 0 where most had to be waited for."""
    if not measurement.traces:
        return measurement.receive_s
    ready = [trace.receive_s for trace in measurement.traces[1:] if trace.collate_end <= trace.requested]
    return statistics.median(ready) if len(ready) >= max(MIN_BATCHES, len(measurement.traces) // 2) else 0.0


def collate_share(measurement: Measurement) -> float | None:
    """Share of a fetch that goes into collating; None without traces."""
    whole = sum(trace.service_s for trace in measurement.traces)
    if whole <= 0:
        return None
    return sum(trace.collate_end - trace.fetch_end for trace in measurement.traces) / whole


def tail(measurement: Measurement) -> float:
    """Slowest of a hundred batches over the median one; 1 where too few batches were seen to tell."""
    services = sorted(trace.service_s for trace in measurement.traces)
    if len(services) < 20 or services[len(services) // 2] <= 0:
        return 1.0
    return services[min(len(services) - 1, int(len(services) * 0.99))] / services[len(services) // 2]
