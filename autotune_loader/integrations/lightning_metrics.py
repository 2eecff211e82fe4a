"""Lightning: `Trainer(callbacks=[LoaderMetrics()])` logs how long the training waits for its loader."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from autotune_loader.integrations import metrics_of, require

IS_OLD = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
NAME = "pytorch_lightning" if IS_OLD else "lightning.pytorch"
require(NAME, "LoaderMetrics")
_lightning = importlib.import_module(NAME)


class LoaderMetrics(_lightning.Callback):  # type: ignore[misc, name-defined]
    """Sends `AutoLoader.metrics()` of the training loader to the trainer's loggers.

    The loader is an AutoLoader, or any loader under `watch`, `run` or `enable()`. Of several, the first is logged.

    Args:
        every_n_steps: Number of batches between two logs; each has the figures since the one before.
        prefix: Put before each name.
    """

    def __init__(self, every_n_steps: int = 50, prefix: str = "loader/") -> None:
        self.every_n_steps, self.prefix, self._batches = every_n_steps, prefix, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._batches += 1
        if self._batches % self.every_n_steps == 0:
            loaders = _lightning.utilities.CombinedLoader(trainer.train_dataloader).flattened
            if figures := metrics_of(loaders, self.prefix):
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=trainer.global_step)
