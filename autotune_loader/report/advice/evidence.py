"""What a verdict rests on, and the figures that verdict and advice draw from it. Pure functions of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotune_loader.decision.space import SAFE_SHARE, Space
from autotune_loader.report.units import bytes_text
from autotune_loader.twin import Twin
from autotune_loader.twin.memory import MemoryModel
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig
from autotune_loader.values.measurement import FailureKind, Measurement
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT, Interval
from autotune_loader.values.trial import Trial

MIN_BATCHES = 4
"""Fewer batches say nothing of a mean."""
FED_GAIN = 0.05
"""With more workers, and batches that lie ready, a rate that is higher by less than this is the same."""
MISSED_GAIN = 0.05
"""A configuration that memory keeps away has to be this much faster to be missed."""
MEMORY_FAILURES: tuple[FailureKind, ...] = ("memory_guard", "oom_killed", "out_of_memory", "shared_memory")
"""What more memory, of either kind, would have prevented."""


class Shortage(NamedTuple):
    """A configuration that would be faster than all that fit, and does not fit."""

    why: str
    """What became of it, or what it would take."""
    is_shared_memory: bool
    gain: float | None
    """Relative gain over the best that fits, as predicted; None where nobody can say."""


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

    @property
    def period_s(self) -> float:
        """Seconds of one round of the training loop at the measured rate."""
        return self.measurement.batch_size / self.rate.value

    @property
    def ceiling_gain(self) -> float | None:
        """Relative gain of a loader that takes neither time nor cores; negative where noise has the rate above the ceiling."""
        return None if self.ceiling is None else self.ceiling.value / self.rate.value - 1

    @property
    def fetching_share(self) -> float:
        """Share of its time in which a worker of the best configuration fetches; 1 without workers."""
        workers = self.best.num_workers
        return min(1.0, self.measurement.service_s / (workers * self.period_s)) if workers else 1.0

    @property
    def bursts(self) -> list[tuple[LoaderConfig, Measurement]]:
        """Every configuration that worked, with its burst; the best one's own where no trial is given."""
        worked = [(trial.config, trial.measurement) for trial in self.trials if trial.measurement is not None]
        return worked or [(self.best, self.measurement)]

    @property
    def telling_burst(self) -> Measurement:
        """The burst with the fewest workers and a quiet machine: there a worker that waits does so for its data, not a core.

        Where the machine was never quiet, the one in which fetches had the CPU for most of their time.
        """
        quiet = [each for each in self.bursts if (each[1].foreign_cpu_share or 0.0) <= FOREIGN_CPU_LIMIT]
        if quiet:
            return min(quiet, key=lambda each: each[0].num_workers)[1]
        return max((burst for _, burst in self.bursts), key=lambda each: each.service_cpu_s / max(each.service_s, 1e-9))

    @property
    def computing_share(self) -> float:
        """Share of a fetch that is spent on a CPU, where nothing else wants it; above 1 where a fetch uses several cores."""
        burst = self.telling_burst
        return burst.service_cpu_s / burst.service_s if burst.service_s > 0 else 1.0

    @property
    def idle_share(self) -> float | None:
        """Share of the cores that nobody used during that burst: what a fetch did not wait for; None without a meter."""
        own, foreign = self.telling_burst.cpu_share, self.telling_burst.foreign_cpu_share
        return None if own is None or foreign is None else max(0.0, 1 - own - foreign)

    @property
    def fed_burst(self) -> Measurement | None:
        """A burst with more workers, most of whose batches lay ready, and which was no faster: its loop waited for no fetch."""
        more = [
            burst
            for config, burst in self.bursts
            if config.num_workers > self.best.num_workers and config.batch_size == self.best.batch_size
        ]
        if any(burst.samples_per_s.value > (1 + FED_GAIN) * self.rate.value for burst in more):
            return None
        return max((burst for burst in more if receive_s(burst) > 0), key=receive_s, default=None)

    @property
    def startup_share(self) -> float:
        """Share of an epoch that worker start-up takes, where workers are not kept."""
        if not self.epoch_batches or self.best.persistent_workers or self.best.num_workers == 0:
            return 0.0
        starting_s = max(0.0, self.measurement.first_batch_s - self.measurement.service_s)
        return starting_s / (starting_s + self.epoch_batches * self.period_s)

    def predicted_gain(
        self, config: LoaderConfig | None = None, cores: float | None = None, *, twin: Twin | None = None
    ) -> float | None:
        """Relative gain over the best configuration as it is; None without a twin.

        Args:
            config: the best one if None.
            cores: those of the machine if None.
            twin: what predicts it where something else is changed; the best as it is is always the job's own twin's.
        """
        if self.twin is None:
            return None
        now, then = (
            self.twin.predict_all([self.best])[0],
            (twin or self.twin).predict_all([config or self.best], cores=cores)[0],
        )
        return then.samples_per_s.value / now.samples_per_s.value - 1 if now.samples_per_s.value > 0 else None

    def shortage(self) -> Shortage | None:
        """What memory keeps away: what ran out of it, else what would; None where that is no loss."""
        for found in (self._ran_out(), self._would_not_fit()):
            missed = [each for each in found if each.gain is None or each.gain > MISSED_GAIN]
            if missed:
                return max(missed, key=lambda each: each.gain or 0.0)
        return None

    def _ran_out(self) -> Iterator[Shortage]:
        """Trials with more workers or a deeper queue that ran out of memory."""
        for each in self.trials:
            is_larger = each.config.batches_in_flight > self.best.batches_in_flight
            if each.failure is not None and each.failure.kind in MEMORY_FAILURES and is_larger:
                gain, kind = self.predicted_gain(each.config), each.failure.kind
                if gain is None and each.predicted_samples_per_s is not None:
                    gain = each.predicted_samples_per_s / self.rate.value - 1
                yield Shortage(f"{each.config} ran out of it ({kind.replace('_', ' ')})", kind == "shared_memory", gain)

    def _would_not_fit(self) -> Iterator[Shortage]:
        """More workers than fit, by what one was measured to take, each with its gain over the fastest that fits."""
        model = MemoryModel.fit(self.bursts)
        if self.space is None or self.twin is None:
            return
        ahead, limits = self.best.prefetch_factor or TORCH_PREFETCH_FACTOR, self.space.limits
        counts = [count for count in self.space.worker_counts() if count > self.best.num_workers]
        configs = [self.best, *(replace(self.best, num_workers=count, prefetch_factor=ahead) for count in counts)]
        rates = [each.samples_per_s.value for each in self.twin.predict_all(configs)]
        lacking: dict[int, tuple[str, float, int]] = {}
        for place, config in enumerate(configs[1:], 1):
            in_flight = config.batches_in_flight * self.measurement.batch_bytes
            needs = [("memory", 0.0 if model is None else model.peak_bytes(config), limits.memory_bytes)]
            for name, need, limit in [("shared memory", in_flight, limits.shm_bytes), *needs]:
                if limit is not None and need > SAFE_SHARE * limit:
                    lacking.setdefault(place, (name, need, limit))
        fits = max(rate for place, rate in enumerate(rates) if place not in lacking)
        for place, (name, need, limit) in lacking.items():
            why = f"{configs[place]} would take {bytes_text(need)} of {name}, and there are {bytes_text(limit)}"
            yield Shortage(why, name == "shared memory", rates[place] / fits - 1 if fits > 0 else 0.0)


def receive_s(measurement: Measurement) -> float:
    """Seconds in which the loop takes over a batch that lies ready; 0 where most had to be waited for."""
    if not measurement.traces:
        return measurement.receive_s
    ready = [trace.receive_s for trace in measurement.traces[1:] if trace.collate_end <= trace.requested]
    return statistics.median(ready) if len(ready) >= max(MIN_BATCHES, len(measurement.traces) // 2) else 0.0
