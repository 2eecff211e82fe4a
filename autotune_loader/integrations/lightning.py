"""Lightning: a data module that tunes the training loader before the first epoch.

    trainer.fit(model, datamodule=tuned(model, MyDataModule(), budget="60s"))

Lightning calls `setup("fit")` on every rank after the ranks have met, so under DDP they tune in lock-step; it then adds its
DistributedSampler to the rebuilt loader as it would to the original.
"""

from __future__ import annotations

from typing import Any

from autotune_loader.integrations import require
from autotune_loader.pipeline.build import rebuild
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.tune import tune
from autotune_loader.values.config import LoaderConfig


def tuned(model: Any, data: Any = None, *, config: LoaderConfig | None = None, **options: Any) -> Any:
    """A `LightningDataModule` around the user's data whose training loader has the tuned configuration.

    Its `result` is the `TuningResult`, once fitting has begun.

    Args:
        model: the `LightningModule`; its `training_step` and optimizer are what bursts train.
        data: a `LightningDataModule`, a DataLoader, or None where the model has its own `train_dataloader`.
        config: a configuration that was tuned before, such as `load_config()`; then nothing is tuned.
        **options: of `tune()`.

    Raises:
        MissingExtraError: Lightning is not installed.
    """
    lightning = require("lightning.pytorch", feature="Tuning in Lightning", extra="lightning")
    source = model if data is None else data
    is_loader = not hasattr(source, "train_dataloader")
    is_data_module = source is not model and not is_loader

    class TunedDataModule(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        result: TuningResult | None = None

        def __init__(self) -> None:
            super().__init__()
            self._config = config

        def prepare_data(self) -> None:
            if is_data_module:
                source.prepare_data()

        def setup(self, stage: str) -> None:
            if is_data_module:
                source.trainer = self.trainer
                source.setup(stage)
            if stage == "fit" and self._config is None:
                self.result = tune(_train_loader(source), model, **options)
                self._config = self.result.best

        def train_dataloader(self) -> Any:
            loader = _train_loader(source)
            return loader if self._config is None else rebuild(loader, self._config)

        def teardown(self, stage: str) -> None:
            if is_data_module:
                source.teardown(stage)

    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        # Only what the user's data has: Lightning takes an attribute of this name for a loader to validate with.
        if is_data_module and getattr(type(source), name, None) is not getattr(lightning.LightningDataModule, name):
            setattr(TunedDataModule, name, lambda self, name=name: getattr(source, name)())
    return TunedDataModule()


def _train_loader(source: Any) -> Any:
    return source.train_dataloader() if hasattr(source, "train_dataloader") else source
