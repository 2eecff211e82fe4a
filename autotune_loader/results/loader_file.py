"""`loader.json`, the file that a result is kept in, field by field.

`LoaderFile` and the dataclasses above it are the only definition of the file: it is written, validated and described
(docs/loader.schema.json) from them. The file is data only: nothing in it is executed or unpickled.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.results.load import read_json
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.serialization import from_plain
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from autotune_loader.version import __version__

RateUnit = Literal["samples/s", "batches/s"]
log = logging.getLogger(__name__)
_File = TypeVar("_File", bound="LoaderFile")
Status = Literal["complete", "undecided", "partial", "fallback"]
ENDED: tuple[Status, ...] = ("complete", "undecided")
"""A search that came to its end, and found something that works."""
Binding = Literal["step", "cpu", "wait", "transport", "pinning", "memory", "startup", "in_memory", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeChoice:
    """Samples per batch, and whether the tuner chose them."""

    value: int | None
    tuned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of the best configuration; null means not measured."""

    rate_unit: RateUnit = "samples/s"
    """Of all rates of the result: batches where it is unknown how many samples these hold."""
    samples_per_s: Interval | None = None
    """Rate of the best configuration, from the finals where they were run."""
    baseline_samples_per_s: Interval | None = None
    speedup: Interval | None = None
    """Best over baseline, from paired rounds."""
    ceiling_samples_per_s: Interval | None = None
    """Rate of the training step on a cached batch: no loader can exceed it. Null also where a rate was seen above it."""
    ceiling_doubt: str | None = None
    """Why the ceiling is null although it was measured."""
    wait_share: float | None = None
    """Share of the time in which the training loop waited for data."""
    wait_interval: Interval | None = None
    """The same with its interval over the paired rounds; null before two of them."""
    first_batch_s: float | None = None
    cpu_share: float | None = None
    gpu_busy_share: float | None = None
    """Share of the time in which the GPU was at work on a step, by its own clock; null where the step runs on none."""
    gpu_util: float | None = None
    """Share of the time in which any kernel of anyone ran, by NVML."""
    gpu_util_reason: str | None = None
    """Why GPU utilisation is null."""
    gpu_memory_bytes: int | None = None
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    pss_slope_bytes_per_s: float | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the twin says of the best configuration; null where it could not say."""

    samples_per_s: Interval | None = None
    epoch_s: float | None = None
    """Seconds of one epoch, worker start-up included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What finding it cost."""

    seconds: float
    """Wall seconds from call to result."""
    bursts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which resource binds the best configuration, and how far its ceiling is."""

    binding: Binding
    sentence: str
    """The verdict for a person, with the evidence in numbers."""
    headroom: float | None = None
    """Ceiling over rate, minus one: what a loader that took neither time nor cores would still gain."""

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One concrete next step."""

    action: str
    """What to do, as a sentence."""
    reason: str
    """The measured evidence for it."""
    expected_gain: float | None = None
    """Estimated relative gain in samples/s; None where there is no estimate."""

    def __str__(self) -> str:
        gain, words = self.expected_gain, ""
        if gain is not None:
            words = f" (about {gain * 100:+.0f} %)" if gain < 1 else f" (about {1 + gain:.1f} times the rate)"
        return f"{self.action.rstrip('.')}{words}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """The interleaved paired rounds between the last candidates: fresh bursts that took no part in the search."""

    configs: tuple[LoaderConfig, ...] = ()
    rounds: tuple[tuple[float | None, ...], ...] = ()
    """Samples/s of each configuration in each round; null where its burst failed."""
    whole_epochs: bool = False
    """Whether whole epochs were run, as these are short: the rates include start-up and the gaps between epochs."""
    foreign_cpu_share: tuple[float | None, ...] = ()
    """Largest share of the CPUs that processes of others kept busy in each round; null where it was not measured."""
    measurements: tuple[Measurement | None, ...] = ()
    """What the bursts of each configuration say together; null where it ran in no round that counts."""
    as_fast: tuple[LoaderConfig, ...] = ()
    """Who counts as equally fast as the chosen one, by the rule that chose it: none of them is cheaper."""
    undecided: str | None = None
    """Why the choice is not decided, and what would decide it; null where it is."""

    def __post_init__(self) -> None:
        if any(len(rates) != len(self.configs) for rates in self.rounds):
            raise ValueError(f"every round of the finals needs {len(self.configs)} rates, one for each configuration")
        if any(rate is not None and not 0 < rate < math.inf for rates in self.rounds for rate in rates):
            raise ValueError("a rate of the finals is a positive number, or null where the burst failed")
        if len(self.measurements) not in (0, len(self.configs)):
            raise ValueError(f"the finals need {len(self.configs)} measurements or none, one for each configuration")

    def rates_of(self, config: LoaderConfig) -> tuple[float, ...]:
        """Samples/s of a configuration in each round that it ran in."""
        if config not in self.configs:
            return ()
        column = self.configs.index(config)
        return tuple(rate for rates in self.rounds if (rate := rates[column]))

    def measurement_of(self, config: LoaderConfig) -> Measurement | None:
        """What the bursts of a configuration say together; None where it did not run, or the file is an older one."""
        if config not in self.configs or not self.measurements:
            return None
        return self.measurements[self.configs.index(config)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """An earlier result that was checked and used instead of a new search."""

    tuned_at: str
    """When it was found: ISO 8601, UTC."""
    samples_per_s: float
    """Rate of the best configuration in the check."""
    speedup: float | None
    """Best over the configuration it was paired with; null where it is that configuration itself."""
    rounds: int
    """Paired rounds of the check."""
    seconds: float
    """Wall seconds that the search took then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFile:
    """`loader.json`, field by field."""

    schema_version: str
    status: Status
    """`complete`; `undecided` when too little, or too disturbed, was measured to choose, so that the configuration is a guess;
    `partial` when it was interrupted; `fallback` when nothing worked and torch's defaults are given."""
    dataloader_kwargs: dict[str, Any]
    """Arguments for `torch.utils.data.DataLoader`, splat-able as they stand."""
    scope: Literal["per_process"] = "per_process"
    """`num_workers` is for each training process (rank)."""
    extras: dict[str, Any] = field(default_factory=dict)
    batch_size: BatchSizeChoice = field(default_factory=lambda: BatchSizeChoice(value=None))
    summary: tuple[str, ...] = ()
    """Sentences a person reads."""
    warnings: tuple[str, ...] = ()
    verdict: Verdict | None = None
    advice: tuple[Advice, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    """Where the time of a sample goes in a worker, the longest stage first; empty where that was not watched."""
    measured: Measured = field(default_factory=Measured)
    predicted: Predicted = field(default_factory=Predicted)
    budget: Spent = field(default_factory=lambda: Spent(seconds=0.0, bursts=0))
    space_hash: str | None = None
    fingerprint: Fingerprint | None = None
    baseline: LoaderConfig | None = None
    trials: tuple[Trial, ...] = ()
    finals: Finals = field(default_factory=Finals)
    twin: TwinContext | None = None
    tolerance: float | None = None
    """Rates this close counted as equally fast; null in files of before it was kept."""
    reused: Reused | None = None
    """Set where the result is an earlier one that was found to hold still."""
    origin: Literal["tune", "live"] = "tune"
    """`live`: found by an AutoLoader while it trained, from blocks of its batches."""
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments for the other loaders of a script, by the line that makes each, such as "train.py:47"."""
    created_by: str = f"autotune_loader {__version__}"


def read_loader_file(path: str | os.PathLike[str]) -> LoaderFile:
    """Read and validate `loader.json`.

    Raises:
        ConfigFileError: missing, too large, not JSON, wrong types, or of a newer major version.
    """
    return read_json(path, lambda raw: checked(raw, LoaderFile, path))


def checked(raw: Any, kind: type[_File], path: str | os.PathLike[str]) -> _File:
    """Plain JSON values as a file whose configuration is legal; keys that it does not know are ignored, with a line in the log.

    Raises:
        ValueError, TypeError: it is not.
    """
    file = from_plain(raw, kind)
    config_in(file)
    if unknown := sorted(raw.keys() - kind.__dataclass_fields__.keys()):
        log.info("%s: keys that this release does not use are ignored: %s", os.fspath(path), ", ".join(unknown))
    return file


def config_in(file: LoaderFile) -> LoaderConfig:
    """The configuration that a file describes."""
    size = {"batch_size": file.batch_size.value} if file.batch_size.tuned else {}
    return LoaderConfig.from_dict({**file.dataloader_kwargs, **file.extras, **size})
