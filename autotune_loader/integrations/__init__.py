"""Tuning inside the tools that training already uses: each module is a thin layer over a framework's public API.

lightning.py          the loader of a data module
lightning_metrics.py  a callback that logs figures of the loader
transformers.py       `TrainingArguments`, or a `Trainer`, and its logs
accelerate.py         before `prepare`, or while training
ipython.py            `%%watch`
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from autotune_loader import MissingExtraError
from autotune_loader.watch.hook import active


def require(module: str, feature: str) -> None:
    """Import a framework's module.

    Raises:
        MissingExtraError: it is not installed; the message names the pip install line.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(feature, package, extra=package) from error


def metrics_of(loaders: Iterable[Any], prefix: str) -> dict[str, float]:
    """Figures since the last call of the first AutoLoader or watched loader among these."""
    # It has been imported if there is an AutoLoader.
    module: Any = sys.modules.get("autotune_loader.autoloader.loader")
    for loader in loaders:
        if module is not None and isinstance(loader, module.AutoLoader):
            return dict(loader.metrics(prefix))
        if active and (figures := active[-1].metrics(loader, prefix)):
            return figures
    return {}
