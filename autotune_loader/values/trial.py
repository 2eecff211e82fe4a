"""One configuration and what came of it: the one record of everything that is observed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One burst of one configuration: exactly one of `measurement` and `failure` is there."""

    number: int
    """Of a burst of the search that of its trial in the Optuna study; of a paired round its position in the result."""
    config: LoaderConfig
    """As it ran."""
    round: int | None = None
    """Number of the paired round that it was run in, from 0; None for the search. Bursts of one round ran in turns."""
    measurement: Measurement | None = None
    failure: Failure | None = None
    predicted_samples_per_s: float | None = None
    """What was expected before the burst, where anything was."""
    seconds: float = 0.0
    """Wall seconds the trial took, start-up and shutdown included."""

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError(f"trial {self.number} needs exactly one of measurement and failure")

    @classmethod
    def of(cls, number: int, config: LoaderConfig, outcome: Measurement | Failure, **more: float | None) -> Trial:
        """The trial with this outcome; `more` are other fields."""
        is_measured = isinstance(outcome, Measurement)
        kept = {"measurement" if is_measured else "failure": outcome}
        return cls(number=number, config=config, **kept, **more)  # type: ignore[arg-type]

    @property
    def outcome(self) -> Measurement | Failure:
        """What came of it."""
        found = self.measurement or self.failure
        assert found is not None
        return found

    @property
    def samples_per_s(self) -> float | None:
        """The measured rate; None when the trial failed."""
        return self.measurement.samples_per_s.value if self.measurement else None

    @property
    def log_rate(self) -> float | None:
        """Logarithm of the rate; None where nothing was delivered."""
        return math.log(self.samples_per_s) if self.samples_per_s else None
