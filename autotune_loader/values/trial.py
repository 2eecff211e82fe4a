"""One configuration and what came of it; and what changes of step or samples were measured to bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import DataChangeKind
from autotune_loader.values.statistics import Interval

TrialRole = Literal["baseline", "default", "search"]
AccelerationKind = Literal["compile", "amp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """What a change to the training step itself would bring, measured on a cached batch: the loader plays no part in it."""

    kind: AccelerationKind
    name: str
    """As a user writes it: "torch.compile", "autocast(bfloat16)"."""
    speedup: Interval | None = None
    """Rate of the changed step over the plain one, from paired rounds; None where it was not measured."""
    loss_difference: float | None = None
    """Largest relative difference of the losses of the first steps, from the same weights on the same batch; None
    where the step returns no loss, or a loss that is no number."""
    loss_noise: float | None = None
    """The same between two runs of the plain step with other random numbers, as dropout makes it."""
    is_same_loss: bool | None = None
    """Whether the difference is what rounding and noise explain; None where there is no loss to compare."""
    warm_up_s: float | None = None
    """Seconds that the first steps took: for torch.compile mostly the compiling."""
    note: str | None = None
    """Why it was not measured, or what else to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChange:
    """What another way to make the same samples would bring, measured over the chosen configuration as it is."""

    kind: DataChangeKind
    config: LoaderConfig | None = None
    """The configuration that it was measured with: fewer workers may do for a cache; None where it was not measured."""
    speedup: Interval | None = None
    """Rate with the change over the rate of the same samples as they are made, from paired rounds; None where not measured."""
    code: str = ""
    """The lines to write for it."""
    difference: float | None = None
    """How far pixels differ from those without it, on average, as a share of their range; None where samples are the same."""
    sample_bytes: float | None = None
    """Bytes that one sample takes in a cache."""
    dataset_bytes: float | None = None
    """The same for all samples."""
    note: str | None = None
    """Why it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration and what came of it: exactly one of `measurement` and `failure` is there."""

    number: int
    """Position in the result, from 0. Optuna numbers also what was asked for and never told: its numbers may run ahead."""
    config: LoaderConfig
    role: TrialRole
    """Why it was tried: the user's own configuration, torch's defaults, or the search."""
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
