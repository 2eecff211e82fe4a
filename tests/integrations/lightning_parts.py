"""A module and its data for Lightning, whose import takes seconds: tests import this file when they run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from tests.integrations.job import Classifier


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(*batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(lightning.LightningDataModule):
    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset, self.ready = dataset, False

    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> Any:
        assert self.ready
        return DataLoader(self.dataset, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=64)
