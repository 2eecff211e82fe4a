"""A module and its data for Lightning, whose import takes seconds: tests import this file when they run."""

from __future__ import annotations

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from tests.integrations.job import Classifier


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch, batch_idx):
        return self.model(*batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.model(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(lightning.LightningDataModule):
    """Overrides every hook that a data module has, and notes which were called."""

    num_classes = 2

    def __init__(self, dataset):
        super().__init__()
        self.dataset, self.called = dataset, set()

    def train_dataloader(self):
        assert "setup" in self.called
        return DataLoader(self.dataset, batch_size=32, shuffle=True)

    def val_dataloader(self):
        self.called.add("val_dataloader")
        return DataLoader(self.dataset, batch_size=64)

    def state_dict(self):
        self.called.add("state_dict")
        return {"rows": len(self.dataset)}

    def load_state_dict(self, state):
        self.called.add("load_state_dict")
        assert state == {"rows": len(self.dataset)}


def noted(name):
    """A hook that notes that it was called, and gives back the batch if it has one."""

    def hook(self, batch=None, *_, **__):
        self.called.add(name)
        return batch

    return hook


NOTED = ("prepare_data", "setup", "teardown")
NOTED += ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
for _name in NOTED:
    setattr(Points, _name, noted(_name))
HOOKS = {*NOTED, "val_dataloader", "state_dict", "load_state_dict"}
