"""Lightning modules in the probe: what they ask of their Trainer is answered, or it is said."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from autotune_loader.bursts.step import StepInferenceError, build_step
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.tuning.arguments import make_workload

pytestmark = [  # Lightning takes seconds to import, and is imported once
    pytest.mark.system,
    pytest.mark.smoke,
    pytest.mark.xdist_group("frameworks"),
    pytest.mark.timeout(300),
]
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
        """Logs, asks its Trainer how long it trains, and augments batches on the device."""

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
            by_step = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": by_step}

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
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizers = [torch.optim.SGD([each], lr=0.1) for each in self.parameters()]
            return optimizers, [torch.optim.lr_scheduler.ConstantLR(optimizers[0], factor=1.0)]

    class Clipped(Plain):
        """Notes the batches whose gradients are clipped, and by what."""

        def __init__(self):
            super().__init__()
            self.batches, self.clipped = 0, []

        def training_step(self, batch):
            self.batches += 1
            return self.loss(batch)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, **how):
            self.clipped.append((self.batches, gradient_clip_val))
            self.clip_gradients(optimizer, gradient_clip_val, **how)

    class Hooked(Plain):
        """Has every hook for batches, of which its data module may have some, too."""

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return noted("model.before", batch)

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return noted(f"model.transfer to {device}", batch)

        def training_step(self, batch, batch_idx):
            return self.loss((batch["x"] * self.trainer.datamodule.scale, batch["y"]))

    class Data(lightning.LightningDataModule):
        scale = 0.5

        def __init__(self, is_broken=False):
            super().__init__()
            self.is_broken = is_broken

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return noted("data.before", batch)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert self.trainer.training
            return {"x": noted("data.after", batch)[0], "y": batch[2 if self.is_broken else 1]}

    called = []
    noted = lambda name, batch: called.append(name) or batch  # noqa: E731
    kinds = {each.__name__: each for each in (Plain, Asking, Manual, Late, Clipped, Hooked, Data)}
    return SimpleNamespace(Trainer=lightning.Trainer, called=called, **kinds)


@pytest.fixture
def attached(modules):
    """A training side of a model that is attached to a Trainer, as within `fit()`."""

    def attached(model, data=None, **options):
        names = ("logger", "enable_checkpointing", "enable_progress_bar")
        quiet = dict.fromkeys(names, False)
        model.trainer = trainer = modules.Trainer(accelerator="cpu", **options, **quiet)
        if data is not None:
            trainer._data_connector.attach_datamodule(model, data)
        return make_workload([BATCH], model).training

    return attached


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
    assert step.description == f"LightningModule.training_step{says}"
    assert step.notes == []
    assert not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "64-true"])
def test_bursts_train_in_the_trainers_precision(modules, attached, precision):
    model = modules.Plain()
    build_step(attached(model, precision=precision), BATCH).run(BATCH)
    is_autocast, dtype = model.seen
    assert is_autocast == (precision == "bf16-mixed")
    assert dtype == (torch.float64 if precision == "64-true" else torch.float32)


def test_gradients_are_clipped_and_accumulated_as_in_training(modules, attached):
    model = modules.Clipped()
    step = build_step(attached(model, gradient_clip_val=0.1, accumulate_grad_batches=3), BATCH)
    weights = []
    for _ in range(8):
        step.run(BATCH)
        weights.append(model.layer.weight.detach().clone())
    changed = [not torch.equal(*pair) for pair in pairwise(weights)]
    assert changed == [False, False, True] * 2 + [False]
    assert model.clipped == [(1, 0.1), (4, 0.1), (7, 0.1)]


def test_a_loss_is_scaled_as_in_training(modules, attached):
    side = attached(modules.Plain())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    side.trainer["precision_plugin"].scaler = scaler
    step = build_step(side, BATCH)
    for _ in range(3):
        step.run(BATCH)
    assert scaler.get_scale() == 4.0 * 2**3


def test_batches_go_through_lightnings_hooks(modules, attached):
    data, model = modules.Data(), modules.Hooked()
    data.loader = DataLoader([1])  # would travel twice
    modules.called.clear()
    build_step(attached(model, data), BATCH).run(BATCH)
    assert modules.called == ["data.before", "model.transfer to cpu", "data.after"]
    assert isinstance(data.trainer, modules.Trainer)
    assert hasattr(data, "loader")


def test_a_hook_that_fails_is_named(modules, attached):
    step = build_step(attached(modules.Hooked(), modules.Data(is_broken=True)), BATCH)
    says = r"Data\.on_after_batch_transfer failed on .*: IndexError"
    with pytest.raises(StepInferenceError, match=says):
        step.run(BATCH)
