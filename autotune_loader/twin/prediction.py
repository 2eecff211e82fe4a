"""What the twin answers: the rate of one configuration, and the stage that sets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

Stage = Literal["workers", "cpu", "storage", "consumer", "transport", "pinning"]
LIMITS: Mapping[Stage, str] = {
    "cpu": "the cores",
    "storage": "the storage",
    "consumer": "the training step",
    "transport": "handing batches over",
    "pinning": "copying into page-locked memory",
}
"""What limits a rate, in words; workers apart, which there may be none of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the twin expects of one configuration."""

    config: LoaderConfig
    samples_per_s: Interval
    """Sustained rate; its interval is as wide as the bursts' own rates lie off the twin. `count` is the number of bursts."""
    epoch_samples_per_s: float
    """Rate over a whole epoch, start-up included; the sustained rate where no epoch length was given."""
    binding: Stage
    """What limits the rate: more workers would help ("workers"), or the cores, the storage, the step with its receipt
    ("consumer"), the receipt alone ("transport") or the pinning thread are full."""
    busy_workers: float
    """Mean number of workers at work."""
    headroom: float
    """How many times what the consumer can take the workers could deliver at this load; 0 without workers."""
    consumer_use: float
    """Share of the time in which the consumer works: receipt and step, or the pinning thread where that takes longer."""
    service_s: float
    """Wall seconds of a batch in a worker, stretched by everything else that is busy."""
    startup_s: float
    """Seconds until the first worker begins."""
    cores: float | None = None
    """Cores that workers and a step on the CPU keep busy on average."""
    pss_bytes: int | None = None
    """Peak memory of the process and its workers, shared pages counted once; None where no burst told."""

    def __str__(self) -> str:
        memory = "" if self.pss_bytes is None else f", {self.pss_bytes / 2**20:,.0f} MiB"
        return f"{self.config}: {self.samples_per_s} samples/s expected, limited by {self._limit}{memory}"

    @property
    def _limit(self) -> str:
        if self.binding == "workers":
            return "the number of workers" if self.config.num_workers else "fetching without a worker"
        return LIMITS[self.binding]
