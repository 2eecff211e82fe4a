"""Accelerate: tune before `prepare`, which only ever sees the rebuilt loader.

    loader, result = tune_before_prepare(accelerator, loader, model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

With `dispatch_batches` (the default for iterable datasets) rank 0 alone loads, for all ranks: then rank 0 alone tunes, with
all cores of its node, and without the step, of which it would see only its own share.
"""

from __future__ import annotations

import warnings
from typing import Any

from autotune_loader.autoloader.loader import AutoLoader
from autotune_loader.integrations import require
from autotune_loader.pipeline.build import rebuild
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.torchrun import alone
from autotune_loader.tuning.tune import tune
from autotune_loader.values.config import LoaderConfig


def tune_before_prepare(accelerator: Any, loader: Any, model: Any = None, **options: Any) -> tuple[Any, TuningResult]:
    """The loader rebuilt as tuned, ready for `accelerator.prepare`, and the result. Every rank must call it.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: the DataLoader as it would be given to `prepare`.
        model: what the step trains, not prepared yet.
        **options: of `tune()`.

    Raises:
        MissingExtraError: Accelerate is not installed.
    """
    require("accelerate", feature="Tuning for Accelerate", extra="accelerate")
    options = {"device": str(accelerator.device), **options}
    if accelerator.num_processes > 1 and dispatches(accelerator, loader):
        result = _tune_for_all(loader, accelerator, options)
        workers = result.best if accelerator.is_main_process else LoaderConfig()
        return rebuild(loader, workers), result
    result = tune(loader, model, **options)
    return rebuild(loader, result.best), result


def tune_live(prepared: Any, **options: Any) -> Any:
    """A loader that `accelerator.prepare` made, or a Trainer's `get_train_dataloader`, tuning itself while it trains.

    The prepared loader stays what it is; what it takes its batches from becomes an AutoLoader: `loader.base_dataloader`.

    Args:
        prepared: the loader.
        **options: of AutoLoader.

    Raises:
        TypeError: Accelerate did not make this loader, or rank 0 loads for all with it.
    """
    from accelerate.data_loader import DataLoaderShard

    if not isinstance(prepared, DataLoaderShard):
        raise TypeError(
            f"prepared={type(prepared).__name__} takes its batches from no loader of its own on each rank; "
            "what accelerator.prepare(loader) returns with dispatch_batches=False would work"
        )
    prepared.base_dataloader = AutoLoader(prepared.base_dataloader, **options)
    return prepared


def dispatches(accelerator: Any, loader: Any) -> bool:
    """Whether rank 0 alone will load and hand out batches."""
    from torch.utils.data import IterableDataset

    chosen = accelerator.dispatch_batches
    return isinstance(loader.dataset, IterableDataset) if chosen is None else bool(chosen)


def _tune_for_all(loader: Any, accelerator: Any, options: dict[str, Any]) -> TuningResult:
    warnings.warn(
        f"dispatch_batches: rank 0 alone loads for {accelerator.num_processes} ranks, so the loader alone was tuned, "
        "on rank 0; "
        "DataLoaderConfiguration(dispatch_batches=False) with a sharded dataset lets all ranks load",
        stacklevel=3,
    )
    # Without a model there is nothing to do with the options that say what is done with a batch.
    of_loader = {name: value for name, value in options.items() if name not in ("train_step", "loss_fn", "optimizer")}
    from accelerate.utils import broadcast_object_list

    result = None
    if accelerator.is_main_process:
        with alone():
            result = tune(loader, None, **of_loader)
    (said,) = broadcast_object_list([None if result is None else result.to_dict()])
    return TuningResult.from_dict(said) if result is None else result
