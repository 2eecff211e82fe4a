"""What every change of how samples are made can say of itself; `data_changes` knows them all."""

from __future__ import annotations

from dataclasses import dataclass

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.measurement import ChangeFacts


@dataclass(frozen=True, kw_only=True)
class PreparedChange:
    """A change of how samples are made, checked on a few of them."""

    facts: ChangeFacts

    def before(self, data: DataSide) -> DataSide:
        """The samples as they are made; fewer of them where the change is tried on some only."""
        return data

    def after(self, data: DataSide) -> DataSide:
        """The same samples with the change."""
        raise NotImplementedError

    def step(self, step: TrainingStep) -> TrainingStep:
        """The step that takes such batches."""
        return step
