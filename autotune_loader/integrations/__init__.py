"""Tuning inside the tools that training already uses: each module is a thin layer over a framework's public API.

lightning.py     the loader of a data module
transformers.py  `TrainingArguments`, or a `Trainer`
accelerate.py    before `prepare`, or while training
ipython.py       `%%watch`
"""

from __future__ import annotations

import importlib

from autotune_loader import MissingExtraError


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
