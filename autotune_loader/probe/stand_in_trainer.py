"""What a Lightning module finds as `self.trainer` while the probe runs its `training_step`: enough to train, nothing to log."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

# A schedule that asks how long training is gets an answer of a usual size.
EPOCHS, BATCHES = 100, 1000
FALSE = "validating testing predicting evaluating sanity_checking barebones fast_dev_run is_last_batch"
NONE = "datamodule train_dataloader gradient_clip_val gradient_clip_algorithm"
ZERO = "current_epoch global_step global_rank local_rank node_rank"
ONE = "world_size num_nodes num_devices accumulate_grad_batches"


def is_lightning_module(model: Any) -> bool:
    """Whether it is one of Lightning's, under either of its two package names; Lightning need not be installed."""
    return any(cls.__name__ == "LightningModule" for cls in type(model).__mro__)


class Silence:
    """Stands in for a logger and its experiment: whatever is looked up or called is silence again."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silence:
        return self


class StandInTrainer(SimpleNamespace):
    """The part of `lightning.Trainer` that modules use in training.

    Args:
        model: the probe's own copy; it is attached, and what it logs goes nowhere.
        optimizer: used instead of those of `configure_optimizers()`; None for those.
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        alike = ((FALSE, False), (NONE, None), (ZERO, 0), (ONE, 1))
        super().__init__(
            **{name: value for names, value in alike for name in names.split()},
            training=True,
            is_global_zero=True,
            max_epochs=EPOCHS,
            max_steps=-1,
            num_training_batches=BATCHES,
            limit_train_batches=1.0,
            estimated_stepping_batches=EPOCHS * BATCHES,
            precision="32-true",
            logger=Silence(),
            loggers=[],
            callbacks=[],
            callback_metrics={},
            logged_metrics={},
            optimizers=[],
            lr_scheduler_configs=[],
            state=SimpleNamespace(fn="fit", stage="train", status="running"),
            precision_plugin=SimpleNamespace(clip_gradients=_clip_gradients),
        )
        self.strategy = SimpleNamespace(
            backward=lambda loss, *_args, **options: loss.backward(**options),
            all_gather=lambda tensor, **_: tensor,
            _lightning_optimizers=self.optimizers,
        )
        model.trainer = self
        for module in (each for each in model.modules() if is_lightning_module(each)):
            module.log = module.log_dict = module.print = lambda *_args, **_options: None
        made, schedulers = ([optimizer], []) if optimizer is not None else _configured(model.configure_optimizers())
        self.optimizers += made
        self.lr_scheduler_configs += [SimpleNamespace(scheduler=each) for each in schedulers]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name}: the probe has no Trainer, and what stands in for one has no `{name}`; "
            "train_step=lambda model, batch: ... returning the loss, with optimizer=, would work"
        )


def _clip_gradients(optimizer: Any, clip_val: float = 0.0, algorithm: Any = "norm") -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clip = torch.nn.utils.clip_grad_value_ if "value" in str(algorithm).lower() else torch.nn.utils.clip_grad_norm_
    if clip_val:
        clip(parameters, clip_val)


def _configured(made: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers in whichever form `configure_optimizers()` returns them."""
    if isinstance(made, (tuple, list)) and len(made) == 2 and all(isinstance(each, (tuple, list)) for each in made):
        optimizers, schedulers = made
    else:
        each = made if isinstance(made, (tuple, list)) else [] if made is None else [made]
        optimizers = [one["optimizer"] if isinstance(one, Mapping) else one for one in each]
        schedulers = [one["lr_scheduler"] for one in each if isinstance(one, Mapping) and one.get("lr_scheduler")]
    return list(optimizers), [one["scheduler"] if isinstance(one, Mapping) else one for one in schedulers]
