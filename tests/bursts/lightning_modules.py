"""Modules of Lightning, whose import takes seconds: tests import this file when they run, not when they are collected."""

from __future__ import annotations

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.nn import functional


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def loss(self, batch):
        return functional.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asking(Module):
    """Logs, asks its Trainer how long it trains, and makes batches ready on the device, as augmentations are."""

    batches = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0] / 2, "y": batch[1]}

    def training_step(self, batch, batch_idx):
        assert batch_idx == self.batches  # what is done at the first one is done once
        self.batches += 1
        loss = self.loss((batch["x"], batch["y"]))
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"epoch": self.current_epoch, "step": self.global_step})
        assert self.trainer.training
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return {"loss": loss, "logits": 1}

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Module):
    """Two optimizers, of which it steps one at a time, and a schedule."""

    automatic_optimization = False

    def training_step(self, batch):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD([each], lr=0.1) for each in (self.layer.weight, self.layer.bias)]
        return optimizers, [torch.optim.lr_scheduler.ConstantLR(optimizers[0], factor=1.0)]
