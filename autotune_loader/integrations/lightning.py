"""Lightning: the training loader is tuned when it is first asked for, in the user's own data module.

    trainer.fit(model, datamodule=tuned(MyDataModule(), model, budget="60s"))
    trainer.fit(model, tuned(loader, model))

The object is the user's own, with its hooks, its state and its attributes; only its `train_dataloader()` gives the loader
with other settings. Lightning calls that on every rank, so under DDP all ranks tune at the same time; it then adds its
DistributedSampler as it would to the original.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune_loader import LoaderConfig, TuningResult, tune
from autotune_loader.integrations import require

_Data = TypeVar("_Data")


def tuned(data: _Data, model: Any = None, *, config: LoaderConfig | None = None, **options: Any) -> _Data:
    """The same data, whose training loader has tuned settings; of a data module `tuning_result` tells what was found.

    Args:
        data: a `LightningDataModule`, a `LightningModule` with a `train_dataloader` of its own, or a DataLoader, of which
            another one is returned.
        model: the `LightningModule`; its `training_step` and optimizer are what bursts train. None where it is `data`.
        config: settings that were tuned before, such as `load_config()`; then nothing is tuned.
        **options: of `tune()`.

    Raises:
        MissingExtraError: Lightning is not installed.
    """
    require("lightning.pytorch", "Tuning in Lightning")
    plan = _Plan(data if model is None else model, config, options)
    if not hasattr(data, "train_dataloader"):
        made: _Data = plan.apply(data)[0]
        return made
    own: Any = data
    # A partial: Lightning looks through it for the method that it overrides, and it can be sent to other ranks.
    own.train_dataloader = functools.partial(_train_dataloader, own, own.train_dataloader, plan)
    own.tuning_result = None
    return data


@dataclass
class _Plan:
    """What is to be done with a loader: once it is known, the settings are kept for the next time it is made."""

    model: Any
    config: LoaderConfig | None
    options: dict[str, Any]

    def apply(self, loader: Any) -> tuple[Any, TuningResult | None]:
        found = None
        if self.config is None:
            found = tune(loader, self.model, **self.options)
            self.config = found.best
        return TuningResult(best=self.config, status="complete").apply_to(loader), found


def _train_dataloader(owner: Any, original: Any, plan: _Plan) -> Any:
    loader, found = plan.apply(original())
    if found is not None:
        owner.tuning_result = found
    return loader
