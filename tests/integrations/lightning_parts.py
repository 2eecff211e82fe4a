"""A module and its data for Lightning, whose import takes seconds: tests import this file when they run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.trained = self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PointsModule(lightning.LightningDataModule):
    def __init__(self, points: Any) -> None:
        super().__init__()
        self.points, self.ready = points, False

    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> Any:
        assert self.ready
        return DataLoader(self.points, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.points, batch_size=64)
