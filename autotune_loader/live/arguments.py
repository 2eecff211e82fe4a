"""The arguments of DataLoader that an AutoLoader was given, those of an existing loader beneath them."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

NEEDS_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
"""Arguments that torch refuses without workers; for an AutoLoader the number of workers is only a start."""


def asked_for(dataset: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of DataLoader by name.

    Args:
        dataset: any dataset, or a loader, which is only read.
        args: positional arguments after it.
        arguments: by name.

    Raises:
        TypeError: DataLoader has no such argument.
    """
    given = inspect.signature(DataLoader).bind(dataset, *args, **arguments).arguments
    if not isinstance(dataset, DataLoader):
        return given
    return {**_arguments_of(dataset), **given, "dataset": dataset.dataset}


def _arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    asked = {name: getattr(loader, name) for name in (*names, *NEEDS_WORKERS, "in_order")}
    if isinstance(loader.dataset, IterableDataset):
        return asked | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return asked | {"batch_size": None, "sampler": loader.sampler}
    if loader.batch_size is not None:  # then it made its batch sampler itself
        return asked | {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return asked | {"batch_sampler": loader.batch_sampler}
