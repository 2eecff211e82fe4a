"""One configuration and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement

TrialRole = Literal["baseline", "default", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration and what came of it: exactly one of `measurement` and `failure` is there."""

    number: int
    """Position in the result, from 0. Optuna numbers also what was asked for and never told: its numbers may run ahead."""
    config: LoaderConfig
    role: TrialRole
    """Why it was tried: the user's own configuration, torch's defaults, or the search."""
    round: int | None = None
    """Paired round that the burst belongs to, from 0; None for a burst of the search."""
    measurement: Measurement | None = None
    failure: Failure | None = None
    predicted_samples_per_s: float | None = None
    """What the twin said before the burst, where it said anything."""
    seconds: float = 0.0
    """Wall seconds the trial took, start-up and shutdown included."""

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError(f"trial {self.number} needs exactly one of measurement and failure")

    @property
    def samples_per_s(self) -> float | None:
        """The measured rate; None when the trial failed."""
        return self.measurement.samples_per_s.value if self.measurement else None


def role_of(config: LoaderConfig, own: LoaderConfig | None) -> TrialRole:
    """Why a configuration is tried: it is the user's own, torch's default, or the search proposes it."""
    if config == own:
        return "baseline"
    return "default" if config == LoaderConfig() else "search"
