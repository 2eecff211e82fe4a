"""Lightning modules in the probe: what they ask of their Trainer is answered, and what cannot be is said."""

from __future__ import annotations

import pytest
import torch

from autotune_loader.bursts.step import build_step
from autotune_loader.pipeline.workload import TrainingSide

pytestmark = pytest.mark.system  # Lightning takes seconds to import

BATCH = (torch.rand(6, 4), torch.randint(0, 3, (6,)))


@pytest.fixture
def modules():
    return pytest.importorskip("tests.bursts.lightning_modules")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("Module", "LightningModule.training_step, then backward and SGD.step()"),
        ("Asking", "LightningModule.training_step, then backward and SGD.step()"),
        ("Manual", "LightningModule.training_step"),
    ],
)
def test_a_module_trains_without_its_trainer(modules, module, says):
    model = getattr(modules, module)()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    step = build_step(TrainingSide(model=model), BATCH)
    for _ in range(3):
        step.run(BATCH)

    assert (step.description, step.notes) == (says, [])
    assert [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)] == [False, False]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "64-true"])
def test_the_precision_of_the_users_trainer_is_trained_in(modules, precision):
    import lightning.pytorch as lightning

    seen = []

    class Telling(modules.Module):
        def training_step(self, batch, batch_idx):
            seen.append((torch.is_autocast_enabled("cpu"), self.layer.weight.dtype))
            return self.loss(batch)

    trainer = lightning.Trainer(precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False)
    side = TrainingSide(model=Telling(), precision=trainer.precision_plugin)
    build_step(side, BATCH).run(BATCH)
    assert seen == [(precision == "bf16-mixed", torch.float64 if precision == "64-true" else torch.float32)]
