"""Lightning modules in the probe: what they ask of their Trainer is answered, and what cannot be is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.step import build_step

pytestmark = pytest.mark.system  # Lightning takes seconds to import

lightning = pytest.importorskip("lightning.pytorch")
BATCH = (torch.rand(6, 4), torch.randint(0, 3, (6,)))


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


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Module, "LightningModule.training_step(batch, batch_idx)"),
        (Asking, "LightningModule.training_step(batch, batch_idx)"),
        (Manual, "LightningModule.training_step(batch), which steps the optimizer itself"),
    ],
)
def test_a_module_trains_without_its_trainer(module, says):
    model = module()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    step = build_step(TrainingSide(model=model), BATCH)
    for _ in range(3):
        step.run(BATCH)

    assert (step.description, step.notes) == (says, [])
    assert [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)] == [False, False]


def test_what_the_stand_in_does_not_have_is_named_with_the_way_around_it():
    class Deep(Module):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * self.trainer.fit_loop.epoch_loop.batch_idx

    with pytest.raises(TypeError, match=r"training_step.*self\.trainer\.fit_loop.*pass train_step="):
        build_step(TrainingSide(model=Deep()), BATCH).run(BATCH)


def test_an_optimizer_that_was_given_takes_the_place_of_the_modules_own():
    model = Module()
    given = torch.optim.Adam(model.parameters())

    build_step(TrainingSide(model=model, optimizer=given), BATCH).run(BATCH)

    assert len(given.state) == 2
