"""What a result consists of besides its figures: these dataclasses define keys of `loader.json` below the first level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RateUnit = Literal["samples/s", "batches/s"]
Status = Literal["complete", "undecided", "partial", "fallback"]
FoundBy = Literal["tune", "autoloader", "watch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What can be said of a run. The tables in `diagnosis` make it; code decides by `kind`, people read `sentence`."""

    kind: str
    """Such as "cpu" or "larger_reads": the name of its row, in lower case."""
    sentence: str
    gain: float | None = None
    """What it is worth at most, relative to the rate now: 0.5 is half as fast again. None where nothing bounds it."""

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was measured of the job besides its bursts: with it a loaded result can predict."""

    usable_cores: int
    """Cores that the step and the workers share."""
    step_cores: float = 1.0
    """Cores that the step keeps busy: its threads on a CPU, 1 where it only feeds an accelerator."""
    step_s: float | None = None
    """Seconds of the step alone, data already in memory."""
    on_accelerator: bool = False
    """Whether the step leaves the cores to the loader."""
    epoch_batches: int | None = None
    """Batches of an epoch; None where that is unknown."""
    read_bytes_per_sample: float | None = None
    """Bytes that bursts read from storage for a sample; 0 where they had them from memory. None where no kernel tells."""
    data_bytes: int | None = None
    """What all samples of an epoch take at this rate; None where that is not known."""
    fits_in_memory: bool | None = None
    """Whether the machine's memory can keep so much."""
