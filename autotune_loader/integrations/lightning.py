"""Lightning: the training loader is tuned when it is first asked for, in the user's own data module.

    trainer.fit(model, datamodule=tuned(MyDataModule(), model, budget="60s"))
    trainer.fit(model, tuned(loader, model))

The object is the user's own, with its hooks, its state and its attributes; only its `train_dataloader()` gives the loader
with other settings. Lightning calls that on every rank, so under DDP all ranks tune at the same time; it then adds its
DistributedSampler as it would to the original. Of several loaders each is tuned, one after the other.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import autotune_loader
from autotune_loader import LoaderConfig, TuningResult
from autotune_loader.integrations import require

ALONE = (
    "{place} is one of the loaders whose batches a step takes together: it is tuned without the step, for its highest rate. "
    "Try train_step=0.05, the seconds of a step, which tell how fast it must be."
)
_Data = TypeVar("_Data")


def tuned(data: _Data, model: Any = None, *, config: LoaderConfig | None = None, **options: Any) -> _Data:
    """The same data, whose training loader has tuned settings; of a data module `tuning_result` tells what was found.

    Args:
        data: a `LightningDataModule`, a `LightningModule` with a `train_dataloader` of its own, or a DataLoader, of which
            another one is returned. A dict, a list or a `CombinedLoader` of loaders stays one, and has a result for each.
        model: the `LightningModule`; its `training_step` and optimizer are what bursts train. None where it is `data`.
        config: settings that were tuned before, such as `load_config()`; then nothing is tuned.
        **options: of `tune()`, for each loader.

    Raises:
        MissingExtraError: Lightning is not installed.
    """
    if "pytorch_lightning" not in sys.modules:  # its other name, which the caller has imported
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
    """What is to be done with loaders: once it is known, the settings are kept for the next time they are made."""

    model: Any
    config: LoaderConfig | None
    options: dict[str, Any]
    found: dict[str, LoaderConfig] = field(default_factory=dict)
    """By the place of the loader among several."""

    def apply(self, data: Any, place: str = "") -> tuple[Any, Any]:
        """The same with the settings, and the result, which is None where they were known; both are of the data's form."""
        if hasattr(data, "flattened"):  # CombinedLoader
            changed = copy.copy(data)
            changed.flattened, found = self.apply(data.flattened, place)
            return changed, found
        if isinstance(data, Mapping):
            named = {key: self.apply(each, f"{place}[{key!r}]") for key, each in data.items()}
            return {key: made for key, (made, _) in named.items()}, {key: result for key, (_, result) in named.items()}
        if isinstance(data, (list, tuple)):
            pairs = [self.apply(each, f"{place}[{number}]") for number, each in enumerate(data)]
            return type(data)(made for made, _ in pairs), type(data)(result for _, result in pairs)
        config, found = self.config or self.found.get(place), None
        if config is None:
            found = self.tune(data, place)
            config = self.found[place] = found.best
        return config.apply_to(data), found

    def tune(self, loader: Any, place: str) -> TuningResult:
        if not place or self.options.get("train_step") is not None:
            return autotune_loader.tune(loader, self.model, **self.options)
        warnings.warn(ALONE.format(place=f"train_dataloader(){place}"), stacklevel=2)
        return autotune_loader.tune(loader, **self.options)


def _train_dataloader(owner: Any, original: Any, plan: _Plan) -> Any:
    loader, found = plan.apply(original())
    if plan.found and owner.tuning_result is None:
        owner.tuning_result = found
    return loader
