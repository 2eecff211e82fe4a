"""Accelerate: tune before `prepare`, which only ever sees the loader with its settings; or tune while training.

loader = tune_before_prepare(accelerator, loader, model)[0]
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

from typing import Any

import autotune_loader
from autotune_loader import AutoLoader, TuningResult
from autotune_loader.integrations import require


def tune_before_prepare(accelerator: Any, loader: Any, model: Any = None, **options: Any) -> tuple[Any, TuningResult]:
    """The loader with tuned settings, ready for `accelerator.prepare`, and the result. Every rank must call it.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: the DataLoader as it would be given to `prepare`.
        model: what the step trains, not prepared yet.
        **options: of `tune()`.

    Raises:
        MissingExtraError: Accelerate is not installed.
        ValueError: one rank loads for all of several, and would be tuned for its own share alone.
    """
    require("accelerate", "Tuning for Accelerate")
    from torch.utils.data import IterableDataset

    dispatches = accelerator.dispatch_batches
    if dispatches is None:  # Accelerate's default
        dispatches = isinstance(loader.dataset, IterableDataset)
    if accelerator.num_processes > 1 and dispatches:
        raise ValueError(
            f"dispatch_batches: rank 0 loads for all {accelerator.num_processes} ranks. "
            "Try DataLoaderConfiguration(dispatch_batches=False) with a sharded dataset."
        )
    with accelerator.autocast():  # of its mixed precision
        result = autotune_loader.tune(loader, model, **{"device": str(accelerator.device), **options})
    return result.apply_to(loader), result


def tune_live(prepared: Any, **options: Any) -> Any:
    """A loader that `accelerator.prepare` made, or a Trainer's `get_train_dataloader`, tuning itself while it trains.

    The prepared loader stays what it is; what it takes its batches from becomes an AutoLoader: `loader.base_dataloader`.

    Args:
        prepared: the loader.
        **options: of AutoLoader.

    Raises:
        MissingExtraError: Accelerate is not installed.
        TypeError: Accelerate did not make this loader, or rank 0 loads for all with it; or it keeps a state, as with
            `use_stateful_dataloader=True`.
    """
    require("accelerate", "tune_live()")
    from accelerate.data_loader import DataLoaderShard

    if not isinstance(prepared, DataLoaderShard):
        raise TypeError(
            f"prepared={type(prepared).__name__} has no DataLoader on each rank. "
            "Try what accelerator.prepare(loader) returns with dispatch_batches=False."
        )
    if hasattr(prepared.base_dataloader, "state_dict"):
        raise TypeError(
            f"prepared has a {type(prepared.base_dataloader).__name__}, whose state_dict() AutoLoader does not have. "
            "Try tune_before_prepare(accelerator, loader)."
        )
    prepared.base_dataloader = AutoLoader(prepared.base_dataloader, **options)
    return prepared
