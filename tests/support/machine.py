"""A machine with a workload on it, as parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure

BASE_BYTES = 500 << 20
"""What training needs without any worker."""
SPIKE_FACTOR = 1.5
"""How much slower a burst is that something disturbs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """A machine with a workload on it; `SimulatedProbe` trains on it. Seconds are those of one batch."""

    cores: int = 4
    batch_size: int = 32
    cpu_s: float = 0.04
    """CPU seconds of a worker, alone on the machine."""
    wait_s: float = 0.0
    """Seconds in which a worker waits for storage or the network."""
    service_cv: float = 0.1
    """Coefficient of variation of a batch's service time (log-normal, a property of its samples)."""
    tail_share: float = 0.0
    """Share of batches that take `tail_factor` times as long."""
    tail_factor: float = 5.0
    receive_s: float = 0.0005
    """Seconds in which the training loop takes a ready batch over."""
    pin_s: float = 0.0005
    """Seconds of the pinning thread."""
    step_s: float = 0.01
    """Seconds of an undisturbed training step."""
    step_cores: float = 0.0
    """Cores that the step uses; 0 for a step on an accelerator, which workers cannot disturb."""
    step_cv: float = 0.02
    alpha: float = 0.05
    """Relative growth of CPU seconds per further worker that runs (caches, memory bandwidth)."""
    beta: float = 0.0
    """The same, per pair of running workers."""
    start_s: float = 0.05
    worker_start_s: float = 0.02
    """Workers start one after the other, then the first indices are handed out."""
    first_batch_extra_s: float = 0.02
    """CPU seconds that every worker's first batch takes longer (imports, cold caches)."""
    batch_bytes: int = 1 << 20
    worker_bytes: int = 100 << 20
    """Private memory of one worker."""
    noise_sd: float = 0.0
    """Relative standard deviation between bursts of one configuration."""
    drift_per_hour: float = 0.0
    """Relative growth of all times per hour of the probe's clock."""
    spike_share: float = 0.0
    """Share of bursts that something disturbs."""
    neighbours: float | None = None
    """Cores that processes of others want. None: the machine has no meter of CPU use, and nobody else runs on it."""
    neighbours_share: float = 1.0
    """Share of bursts beside which they run."""
    fails: Callable[[LoaderConfig], Failure | None] | None = None
    """Configurations that fail, and how."""
