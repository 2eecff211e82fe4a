"""A Lightning module outside of its Trainer: what it finds as `self.trainer` while bursts run its `training_step`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

NOT_THERE = (
    "self.trainer.{name}: trials have no Trainer; pass train_step=lambda model, batch: ..., which returns the loss"
)
IN_TRAINING: dict[str, Any] = {
    **dict.fromkeys(("validating", "testing", "predicting", "evaluating", "sanity_checking", "fast_dev_run"), False),
    **dict.fromkeys(("datamodule", "train_dataloader", "gradient_clip_val", "gradient_clip_algorithm"), None),
    **dict.fromkeys(("current_epoch", "global_step", "global_rank", "local_rank", "node_rank"), 0),
    **dict.fromkeys(("world_size", "num_nodes", "num_devices", "accumulate_grad_batches"), 1),
    "training": True,
    "is_global_zero": True,
    "is_last_batch": False,
    "max_epochs": 100,
    "max_steps": -1,
    "num_training_batches": 1000,
    "estimated_stepping_batches": 100_000,
    "loggers": [],
    "callbacks": [],
    "callback_metrics": {},
}
"""What a Trainer of one process says in the midst of training of a usual length."""


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
        model: the copy that bursts train; it is attached, and what it logs goes nowhere.
        optimizer: used instead of those of `configure_optimizers()`; None for those.
        precision: the precision plugin of the user's Trainer; None trains in the model's own.
    """

    def __init__(self, model: Any, optimizer: Any, precision: Any) -> None:
        package = next(cls.__module__ for cls in type(model).__mro__ if cls.__name__ == "LightningModule")
        plugins = importlib.import_module(f"{package.removesuffix('.core.module')}.plugins.precision")
        precision = precision or plugins.Precision()
        super().__init__(**IN_TRAINING, precision=precision.precision, logger=Silence())
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.precision_plugin = precision
        self.strategy = SimpleNamespace(
            backward=lambda loss, *_args, **options: loss.backward(**options),
            all_gather=lambda tensor, **_: tensor,
            _lightning_optimizers=self.optimizers,
        )
        precision.convert_module(model)
        self._model, model.trainer = model, self
        for module in (each for each in model.modules() if is_lightning_module(each)):
            module.log = module.log_dict = module.print = lambda *_args, **_options: None
        made, schedulers = ([optimizer], []) if optimizer is not None else _configured(model.configure_optimizers())
        self.optimizers += made
        for each in made:
            each.toggle_model = functools.partial(_toggled, model, each)
        self.lr_scheduler_configs += [SimpleNamespace(scheduler=each) for each in schedulers]
        self._batches = 0
        self._takes_index = len(inspect.signature(model.training_step).parameters) > 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(NOT_THERE.format(name=name))

    def training_step(self, batch: Any) -> Any:
        """What the module's own returns, in the precision of the user's Trainer."""
        batch = self.precision_plugin.convert_input(batch)
        for hook in (self._model.on_before_batch_transfer, self._model.on_after_batch_transfer):
            batch = hook(batch, 0)
        number, self._batches = self._batches, self._batches + 1
        with self.precision_plugin.forward_context():
            return self._model.training_step(batch, number) if self._takes_index else self._model.training_step(batch)


@contextlib.contextmanager
def _toggled(model: Any, optimizer: Any, sync_grad: bool = True) -> Iterator[None]:  # noqa: ARG001 - as Lightning's own
    model.toggle_optimizer(optimizer)
    yield
    model.untoggle_optimizer(optimizer)


def _configured(made: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers in whichever form `configure_optimizers()` returns them."""
    if isinstance(made, (tuple, list)) and len(made) == 2 and all(isinstance(each, (tuple, list)) for each in made):
        optimizers, schedulers = made
    else:
        each = made if isinstance(made, (tuple, list)) else [] if made is None else [made]
        optimizers = [one["optimizer"] if isinstance(one, Mapping) else one for one in each]
        schedulers = [one["lr_scheduler"] for one in each if isinstance(one, Mapping) and one.get("lr_scheduler")]
    return list(optimizers), [one["scheduler"] if isinstance(one, Mapping) else one for one in schedulers]
