"""What the twin answers: the rate of one configuration, and the stage that sets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune_loader.twin.calibration import Calibration
from autotune_loader.twin.stages import Columns, Load, Stages, loop_s
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
STRETCHED = 1.1
"""From this factor on, shared cores (or waiting that grows) are named as what limits the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the twin expects of one configuration."""

    config: LoaderConfig
    samples_per_s: Interval
    """Sustained rate with its 95 % interval; `count` is the number of bursts behind it."""
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


def binding_stage(i: int, rate: float, columns: Columns, stages: Stages, load: Load, calibration: Calibration) -> Stage:
    """The stage that is busy for the largest share of its time."""
    workers = int(columns.workers[i])
    receive_s, step_s, service_s = (float(s[i]) for s in (stages.receive_s, stages.step_s, stages.service_s))
    consumer: Stage = "transport" if receive_s > step_s else "consumer"
    if workers == 0:
        return "workers" if service_s > receive_s + step_s else consumer
    use: dict[Stage, float] = {
        "workers": rate * service_s / workers,
        consumer: rate * float(loop_s(receive_s, step_s, int(columns.ahead[i]))),
        "pinning": rate * float(stages.pin_s[i]),
    }
    busiest = max(use, key=lambda stage: use[stage])
    if busiest != "workers":
        return busiest
    return _why_workers_are_slow(i, columns, stages, load, calibration)


def _why_workers_are_slow(i: int, columns: Columns, stages: Stages, load: Load, calibration: Calibration) -> Stage:
    cpu_share = float(stages.cpu_share[i])
    growth = 1.0 + float(calibration.contention.gamma[0]) * max(float(load.busy[i]) - 1.0, 0.0)
    step_cores = float(calibration.contention.step_cores[0] * columns.step_threads[i] * load.consumer[i])
    wanted = float(load.wanting[i]) + step_cores
    if cpu_share >= 0.5 and wanted >= float(columns.cores[i]) / STRETCHED:
        return "cpu"
    return "storage" if cpu_share < 0.5 and growth > STRETCHED else "workers"
