"""What one traced burst tells the twin: raw samples of each stage, and how many workers were busy meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune_loader.config import LoaderConfig
from autotune_loader.trial import Measurement
from autotune_loader.twin.readings import mean_stages, read_stages, split_pinning
from autotune_loader.twin.recursion import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """What one traced burst tells the twin. The sample arrays may differ in length: each is cleaned on its own."""

    num_workers: int
    """Worker processes of the burst."""
    prefetch_factor: int
    """Batches each worker was handed ahead; 1 without workers."""
    service_s: Floats
    """Wall seconds of fetch and collate, one per warm batch."""
    cpu_s: Floats
    """CPU seconds of fetch and collate, in step with `service_s`."""
    receive_s: Floats
    """Seconds in which the training loop took a ready batch over; those of batches it waited for where none was ready."""
    step_s: Floats
    """Seconds of the step, with the loop's own overhead."""
    batch_size: float
    """Mean samples per batch."""
    samples_per_s: float
    """Rate that the burst itself measured."""
    busy_workers: float
    """Workers that were fetching while a batch was fetched, its own included: the mean over the batches."""
    at_work: float | None = None
    """Mean number of workers at work; None leaves it to the rate and the service time (Little's law)."""
    pin_memory: bool = False
    """Whether the pinning thread handed the batches over; `receive_s` then holds the hand-over alone."""
    pin_s: float | None = None
    """Seconds of the pinning thread per batch; None when it did not run or was never waited for."""
    consumer_threads: int | None = None
    """Intra-op threads that were set for the step."""
    device_prefetch: int = 0
    """Batches copied ahead of the step."""
    between_s: float | None = None
    """Seconds of a worker from one batch to the next when its order is there; None where it never was."""
    waited_s: float | None = None
    """Median seconds from a whole batch to the training loop that waited for it; None where it hardly ever waited."""
    saw_ready: bool = True
    """Whether `receive_s` is of batches that lay ready."""
    startup_s: float = 0.0
    """From creating the iterator until the first worker could begin."""
    batch_bytes: int = 0
    """Bytes of the tensors in one batch."""
    copy_s: float = 0.0
    """Seconds of `receive_s` that were the copy to a device."""
    positions: tuple[int, ...] = ()
    """Position in the sampler's order of each of `service_s`; empty where it is not known."""

    def __post_init__(self) -> None:
        for name in ("service_s", "cpu_s", "receive_s", "step_s"):
            values = getattr(self, name)
            if len(values) == 0 or not np.all(np.isfinite(values)) or np.min(values) < 0:
                raise ValueError(f"{name} needs one finite sample >= 0 or more, such as [0.01], but is {values!r}")
        if len(self.service_s) != len(self.cpu_s):
            raise ValueError(
                f"{len(self.service_s)} service_s and {len(self.cpu_s)} cpu_s samples; give as many of each"
            )

    @classmethod
    def from_measurement(cls, config: LoaderConfig, measurement: Measurement) -> Observation:
        """What `measurement`'s traces tell; its means, where there are no traces.

        The first batch of every worker and the first step are left out by position (lazy imports, cold caches), never
        by value, so that a genuine heavy tail stays.
        """
        traces = measurement.traces
        stages = read_stages(traces, config) if traces else mean_stages(config, measurement)
        handed_over, pinned = stages.receive_s, None
        if config.pin_memory and config.num_workers > 0 and traces:
            handed_over, pinned = split_pinning(traces)
        if config.device_prefetch and measurement.gpu.copy_s is not None:
            # Hidden behind the step it leaves no trace in the loop; it is what another depth has to hide, too.
            handed_over = np.array([measurement.gpu.copy_s])
        return cls(
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor or 1,
            service_s=stages.service_s,
            cpu_s=stages.cpu_s,
            receive_s=handed_over,
            step_s=stages.step_s,
            batch_size=measurement.batch_size,
            samples_per_s=measurement.samples_per_s.value,
            busy_workers=stages.busy_workers,
            at_work=stages.at_work,
            pin_memory=config.pin_memory,
            pin_s=pinned,
            between_s=stages.between_s,
            waited_s=stages.waited_s,
            saw_ready=stages.saw_ready,
            consumer_threads=config.consumer_threads,
            device_prefetch=config.device_prefetch,
            startup_s=max(0.0, measurement.first_batch_s - stages.first_fetch_s),
            batch_bytes=measurement.batch_bytes,
            copy_s=measurement.gpu.copy_s or 0.0,
            positions=stages.positions if config.in_order else (),
        )

    @property
    def batches_per_s(self) -> float:
        """Rate that the burst itself measured, in batches."""
        return self.samples_per_s / self.batch_size

    @property
    def workers_at_work(self) -> float:
        """Mean number of workers at work in the steady part of the burst."""
        if self.at_work is not None:
            return self.at_work
        return min(float(self.num_workers), self.batches_per_s * float(self.service_s.mean()))

    @property
    def consumer_share(self) -> float:
        """Share of the time in which the training loop received or stepped."""
        return min(1.0, self.batches_per_s * float(self.receive_s.mean() + self.step_s.mean()))
