"""A module and its data for Lightning; the import takes seconds: tests do it when they run."""

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from tests.integrations.job import Classifier

QUIET = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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
        return DataLoader(self.dataset, batch_size=64)

    def state_dict(self):
        return {"rows": len(self.dataset)}

    def load_state_dict(self, state):
        assert state == {"rows": len(self.dataset)}


def noted(name, plain):
    return lambda self, *args, **kwargs: self.called.add(name) or plain(self, *args, **kwargs)


HOOKS = {"prepare_data", "setup", "teardown", "val_dataloader", "state_dict", "load_state_dict"}
HOOKS |= {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
for _name in HOOKS:
    setattr(Points, _name, noted(_name, getattr(Points, _name)))
