"""Lightning modules in the probe: what they ask of their Trainer is answered, and what cannot be is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.step import TrainingStep, build_step

pytestmark = pytest.mark.system  # Lightning takes seconds to import

lightning = pytest.importorskip("lightning.pytorch")
BATCH = (torch.rand(6, 4), torch.randint(0, 3, (6,)))
AUTOMATIC = "LightningModule.training_step(batch, batch_idx)"
ITSELF = f"{AUTOMATIC}, which steps the optimizer itself"


class Module(lightning.LightningModule):
    automatic = True

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.automatic_optimization = nn.Linear(4, 3), self.automatic

    def loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asking(Module):
    """Logs, asks its Trainer how long it trains, and makes batches ready on the device, as augmentations are."""

    batches = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0] / 2, "y": batch[1]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch_idx == self.batches  # what is done at the first one is done once
        self.batches += 1
        loss = self.loss((batch["x"], batch["y"]))
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"epoch": self.current_epoch, "step": self.global_step})
        assert self.trainer.training
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return {"loss": loss, "logits": 1}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Module):
    automatic = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)]


class TwoOptimizers(Module):
    automatic = False

    def training_step(self, batch: Any) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], lr=0.1)


def trained(model: Any) -> TrainingStep:
    step = build_step(TrainingSide(model=model), BATCH)
    for _ in range(3):
        step.run(BATCH)
    return step


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Module, AUTOMATIC),
        (Asking, AUTOMATIC),
        (Manual, ITSELF),
        (TwoOptimizers, "LightningModule.training_step(batch), which steps the optimizer itself"),
    ],
)
def test_a_module_trains_without_its_trainer(module: Any, says: str) -> None:
    model = module()
    before = [model.layer.weight.detach().clone(), model.layer.bias.detach().clone()]

    step = trained(model)

    assert (step.description, step.notes) == (says, [])
    assert [torch.equal(model.layer.weight, before[0]), torch.equal(model.layer.bias, before[1])] == [False, False]


def test_what_the_stand_in_does_not_have_is_named_with_the_way_around_it() -> None:
    class Deep(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.trainer.fit_loop.epoch_loop.batch_idx

    with pytest.raises(TypeError, match=r"training_step.*self\.trainer\.fit_loop.*pass train_step="):
        trained(Deep())


def test_an_optimizer_that_was_given_takes_the_place_of_the_modules_own() -> None:
    model = Manual()
    given = torch.optim.Adam(model.parameters())
    model.lr_schedulers = lambda: torch.optim.lr_scheduler.ConstantLR(given, factor=1.0)
    step = build_step(TrainingSide(model=model, optimizer=given), BATCH)

    step.run(BATCH)

    assert len(given.state) == 2
