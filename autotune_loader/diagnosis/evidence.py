"""What a diagnosis rests on: figures of one loader in its training loop, and what is derived from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune_loader.values import BURSTS_DIFFER, Interval, LoaderConfig, Measurement, RateUnit, StageTime, Trial

if TYPE_CHECKING:
    from autotune_loader.pipeline.forking import ParentProcess

FOREIGN_CPU_LIMIT = 0.25
"""A trial or round with a larger foreign CPU share was disturbed: on 4 cores that is one whole core that a worker wanted."""
NEGLIGIBLE = 0.05
"""Clocks and trials show no less: a loop that waits for a smaller share does not wait, and closer rates are the same."""
ALIKE = ["wait_share", "batch_size", "batch_bytes", "step_s", "pin_s", "copy_s", "cpu_share", "foreign_cpu_share"]
"""Fields that evidence and measurements have under one name."""
MEMORY_FAILURES = ("memory_guard", "oom_killed", "out_of_memory", "shared_memory")
"""Failures that more memory, shared or not, would have prevented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was measured of a loader in its loop; None is "not measured". Seconds are means of one batch."""

    config: LoaderConfig
    """As the loader ran."""
    samples_per_s: float
    wait_share: float | None
    """Share of the time in which the loop waited for data; None where no step could be timed."""
    cores: float
    """Those that the step and the workers share."""
    batch_size: float = 1.0
    """Samples of a batch; 1 where rates are of batches."""
    rate_unit: RateUnit = "samples/s"
    batch_bytes: int = 0
    step_s: float | None = None
    fetch_s: float | None = None
    """What a worker, or the loop, takes to fetch and collate."""
    fetch_cpu_s: float | None = None
    fetch_queued_s: float | None = None
    """What a fetch waits for a core, not part of `fetch_s`; None where the kernel does not tell."""
    receive_queued_s: float = 0.0
    """The same of the loop while it receives a batch."""
    receive_s: float | None = None
    """What the loop takes to receive a batch that lies ready; 0 where none did."""
    pin_s: float | None = None
    """What a thread takes to pin it; None where none does."""
    copy_s: float | None = None
    """What the copy to the device adds to a step; None off a device."""
    starting_share: float = 0.0
    """Share of the time in the starts of epochs."""
    batches: int | None = None
    """How many this rests on; None for enough."""
    loader_share: float = 1.0
    """What the loop waited for this loader, as a share of its time with all loaders."""
    cpu_share: float | None = None
    """CPU use of loop and workers, as a share of `cores`."""
    foreign_cpu_share: float | None = None
    ceiling: Interval | None = None
    """Rate of the step alone."""
    transfer_ceiling: Interval | None = None
    """Rate of the step on batches that lie ready in DataLoader's workers."""
    on_accelerator: bool = False
    """Whether the step leaves the cores to the loader."""
    has_batched_fetch: bool = True
    """Whether the dataset can fetch batches, or that cannot be told."""
    stages: Sequence[StageTime] = ()
    """Where the time of a sample goes in a worker."""
    trials: Sequence[Trial] = ()
    """What was measured of other configurations of the same job."""
    parent: ParentProcess | None = None
    """What workers were forked from; None where they were not."""

    @classmethod
    def of(
        cls, measured: Measurement, *, config: LoaderConfig, cores: float, epoch_batches: int | None = None, **more: Any
    ) -> Evidence:
        """The evidence of a burst; `more` are other fields, and win over it."""
        known: dict[str, Any] = {name: getattr(measured, name) for name in ALIKE}
        known |= {"samples_per_s": measured.samples_per_s.value, "receive_s": ready_s(measured)}
        known |= {"fetch_s": measured.service_s, "fetch_cpu_s": measured.service_cpu_s}
        first_batch_s = measured.first_batch_s
        if epoch_batches and config.num_workers and not config.persistent_workers and first_batch_s is not None:
            starting_s = max(0.0, first_batch_s - measured.service_s)
            epoch_s = epoch_batches * measured.batch_size / measured.samples_per_s.value
            known["starting_share"] = starting_s / (starting_s + epoch_s)
        return cls(config=config, cores=cores, **{**known, **more})

    @property
    def foreign_share(self) -> float:
        """Share of the CPU that other processes used, as far as that was measured."""
        return self.foreign_cpu_share or 0.0

    @property
    def period_s(self) -> float:
        """Seconds of one batch at the measured rate."""
        return self.batch_size / self.samples_per_s

    @property
    def alone_s(self) -> float:
        """Seconds of a batch's step alone; of its step in the loop where there is no ceiling."""
        return (self.step_s or 0.0) if self.ceiling is None else self.batch_size / self.ceiling.value

    @property
    def headroom(self) -> float | None:
        """What data without waiting would gain at most, relatively; None where nothing bounds it.

        On an accelerator the step alone bounds it. On a CPU that has all cores, which a loader always shares: there the wait
        bounds it, too, or the fastest burst if that was faster.
        """
        waits = math.inf if self.wait_share is None or self.wait_share >= 1 else self.wait_share / (1 - self.wait_share)
        fastest = max(self.rates, default=0.0) / self.samples_per_s - 1
        if self.ceiling is None:
            return waits if max(fastest, 0.0) <= waits < math.inf else None
        alone = max(0.0, self.ceiling.value / self.samples_per_s - 1)
        return alone if self.on_accelerator else min(alone, max(waits, fastest))

    @property
    def handed_over(self) -> Interval | None:
        """The rate of the step on batches that lie ready in workers, where that is clearly below the step alone."""
        if self.ceiling is None or self.transfer_ceiling is None:
            return None
        return self.transfer_ceiling if self.transfer_ceiling.value < (1 - BURSTS_DIFFER) * self.ceiling.value else None

    def reaches(self, ceiling: Interval | None) -> bool:
        """Whether the loop is as fast as that; not where it is not known."""
        return ceiling is not None and self.samples_per_s >= (1 - NEGLIGIBLE) * ceiling.value

    @property
    def fetching_share(self) -> float:
        """Share of its time in which a worker fetches; 1 without workers."""
        if self.config.num_workers == 0 or self.fetch_s is None:
            return 1.0
        return min(1.0, self.fetch_s / (self.config.num_workers * self.period_s))

    @property
    def saved_s(self) -> float:
        """Seconds that a batch would take less if its copy took none: workers that always fetch bring none sooner."""
        rest_s = self.period_s * (1 - self.fetching_share) if self.config.num_workers else math.inf
        return min(self.copy_s or 0.0, rest_s)

    @property
    def bursts(self) -> list[tuple[LoaderConfig, Measurement]]:
        """Every configuration that was measured."""
        return [(trial.config, trial.measurement) for trial in self.trials if trial.measurement is not None]

    @property
    def rates(self) -> list[float]:
        """Rates with batches of the caller's size; others have another step."""
        return [burst.samples_per_s.value for config, burst in self.bursts if config.batch_size is None]

    @property
    def undisturbed(self) -> Evidence:
        """A fetch where nothing else wanted its core: with the fewest workers, on a quiet machine.

        There, a worker that waits does so for its data. Where the machine was never quiet, it is the trial whose fetches had
        the CPU for most of their time.
        """
        found = [Evidence.of(burst, config=config, cores=self.cores) for config, burst in self.bursts]
        quiet = [each for each in found if each.foreign_share <= FOREIGN_CPU_LIMIT]
        if quiet:
            return min(quiet, key=lambda each: each.config.num_workers)
        return max(found, key=lambda each: each.computing_share, default=self)

    @property
    def computing_share(self) -> float:
        """Share of a fetch that is spent on a CPU; above 1 where it uses several cores."""
        return (self.fetch_cpu_s or 0.0) / self.fetch_s if self.fetch_s else 1.0

    @property
    def waiting(self) -> tuple[float, float, float] | None:
        """Shares of the loop's waiting: computing, waiting for a core, and neither; None where that is not known.

        With workers the loop itself computes, or waits for a core, while it receives. For the rest it waits for a fetch.
        """
        if not self.wait_share or not self.fetch_s or self.fetch_cpu_s is None or self.fetch_queued_s is None:
            return None
        wait_s = self.wait_share * self.period_s
        own_s, own_queued_s = (self.receive_s or 0.0, self.receive_queued_s) if self.config.num_workers else (0.0, 0.0)
        fetch_s = max(0.0, wait_s - own_s - own_queued_s)
        scale = fetch_s / (max(self.fetch_s, self.fetch_cpu_s) + self.fetch_queued_s)
        computing_s, core_s = own_s + scale * self.fetch_cpu_s, own_queued_s + scale * self.fetch_queued_s
        whole_s = max(wait_s, computing_s + core_s)
        return computing_s / whole_s, core_s / whole_s, 1 - (computing_s + core_s) / whole_s

    @property
    def ran_out(self) -> Trial | None:
        """The smallest configuration that ran out of memory, had more batches in flight, and might have been faster.

        None where others with more workers ran and were no faster, or where it was predicted to be no faster.
        """
        own, least = self.config, (1 + NEGLIGIBLE) * self.samples_per_s
        more = [burst.samples_per_s.value for config, burst in self.bursts if config.num_workers > own.num_workers]
        if more and max(more) <= least:
            return None
        larger = [each for each in self.trials if each.config.batches_in_flight > own.batches_in_flight]
        failed = [each for each in larger if each.failure is not None and each.failure.kind in MEMORY_FAILURES]
        missed = [each for each in failed if (each.predicted_samples_per_s or 2 * least) > least]
        return min(missed, key=lambda each: each.config.batches_in_flight, default=None)


def ready_s(measured: Measurement) -> float:
    """Seconds in which the loop receives a batch that is whole, pinning included; 0 where most had to be waited for."""
    if not measured.traces:
        return measured.receive_s
    ready = [trace.wait_s for trace in measured.traces[1:] if trace.collate_end <= trace.requested]
    return statistics.median(ready) if 2 * len(ready) >= len(measured.traces) else 0.0
