"""Lightning modules in the probe: what they ask of their Trainer is answered, and what cannot be is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune_loader.bursts.step import build_step
from autotune_loader.pipeline.workload import TrainingSide

pytestmark = pytest.mark.system  # Lightning takes seconds to import

BATCH = (torch.rand(6, 4), torch.randint(0, 3, (6,)))


@pytest.fixture(scope="module")
def modules():
    lightning = pytest.importorskip("lightning.pytorch")

    class Plain(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def loss(self, batch):
            return functional.cross_entropy(self.layer(batch[0]), batch[1])

        def training_step(self, batch, batch_idx):
            self.seen = (torch.is_autocast_enabled("cpu"), self.layer.weight.dtype)
            return self.loss(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Asking(Plain):
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

    class Late(Plain):
        """Is complete once it was configured, and toggles its only optimizer."""

        automatic_optimization = False

        def configure_model(self):
            self.activation = nn.ReLU()

        def training_step(self, batch):
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=False):
                optimizer.zero_grad()
                self.manual_backward(self.activation(self.loss(batch)))
                optimizer.step()

    class Manual(Plain):
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

    return SimpleNamespace(Trainer=lightning.Trainer, Plain=Plain, Asking=Asking, Manual=Manual, Late=Late)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("Plain", ", then backward and SGD.step()"),
        ("Asking", ", then backward and SGD.step()"),
        ("Manual", ""),
        ("Late", ""),
    ],
)
def test_a_module_trains_without_its_trainer(modules, module, says):
    model = getattr(modules, module)()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = build_step(TrainingSide(model=model), BATCH)
    for _ in range(3):
        step.run(BATCH)
    assert (step.description, step.notes) == (f"LightningModule.training_step{says}", [])
    assert [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)] == [False, False]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "64-true"])
def test_the_precision_of_the_users_trainer_is_trained_in(modules, precision):
    trainer = modules.Trainer(precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False)
    model = modules.Plain()
    build_step(TrainingSide(model=model, trainer={"precision_plugin": trainer.precision_plugin}), BATCH).run(BATCH)
    assert model.seen == (precision == "bf16-mixed", torch.float64 if precision == "64-true" else torch.float32)
