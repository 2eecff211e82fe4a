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


class WithData(Module):
    """Has its training loader itself."""

    dataset: Any = None

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=32, shuffle=True)


class Points(lightning.LightningDataModule):
    """Overrides every hook that a data module has, and notes which were called."""

    num_classes = 2

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset, self.ready, self.called = dataset, False, set[str]()

    def prepare_data(self) -> None:
        self.called.add("prepare_data")

    def setup(self, stage: str) -> None:
        self.ready = True
        self.called.add("setup")

    def teardown(self, stage: str) -> None:
        self.called.add("teardown")

    def train_dataloader(self) -> Any:
        assert self.ready
        return DataLoader(self.dataset, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        self.called.add("val_dataloader")
        return DataLoader(self.dataset, batch_size=64)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.add("on_before_batch_transfer")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.called.add("transfer_batch_to_device")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.add("on_after_batch_transfer")
        return batch

    def state_dict(self) -> dict[str, Any]:
        self.called.add("state_dict")
        return {"rows": len(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called.add("load_state_dict")
        assert state == {"rows": len(self.dataset)}


HOOKS = {name for name in vars(Points) if not name.startswith("_")} - {"num_classes", "train_dataloader"}
