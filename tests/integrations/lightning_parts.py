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


def noted(name: str) -> Any:
    """A hook that notes that it was called, and gives back the batch if it has one."""

    def hook(self: Any, *arguments: Any, **_: Any) -> Any:
        self.called.add(name)
        return arguments[0] if arguments else None

    return hook


class Points(lightning.LightningDataModule):
    """Overrides every hook that a data module has, and notes which were called."""

    num_classes = 2

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset, self.called = dataset, set[str]()

    def train_dataloader(self) -> Any:
        assert "setup" in self.called
        return DataLoader(self.dataset, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        self.called.add("val_dataloader")
        return DataLoader(self.dataset, batch_size=64)

    def state_dict(self) -> dict[str, Any]:
        self.called.add("state_dict")
        return {"rows": len(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called.add("load_state_dict")
        assert state == {"rows": len(self.dataset)}


NOTED = ("prepare_data", "setup", "teardown")
NOTED += ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
for _name in NOTED:
    setattr(Points, _name, noted(_name))
HOOKS = {*NOTED, "val_dataloader", "state_dict", "load_state_dict"}
