"""The arguments of DataLoader that an AutoLoader was given, those of an existing loader beneath them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from typing import Any

from torch.utils.data import DataLoader

from autotune_loader.pipeline.build import batching_of
from autotune_loader.values.config import LoaderConfig

NEEDS_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
"""Arguments that torch refuses without workers; for an AutoLoader the number of workers is only a start."""


def asked_for(
    dataset: Any, args: tuple[Any, ...], arguments: dict[str, Any], own: Collection[str] = ()
) -> dict[str, Any]:
    """Arguments of DataLoader by name.

    Args:
        dataset: any dataset, or a loader, which is only read.
        args: positional arguments after it.
        arguments: by name.
        own: names of what AutoLoader takes beyond them; told to who mistypes one.

    Raises:
        TypeError: DataLoader has no such argument.
    """
    known = [*inspect.signature(DataLoader).parameters]
    for name in arguments.keys() - known:
        near = difflib.get_close_matches(name, [*known, *own], n=1) or known
        raise TypeError(
            f"{name}={arguments[name]!r} is an argument of neither AutoLoader nor DataLoader; {' or '.join(near)} would work"
        )
    given = inspect.signature(DataLoader).bind(dataset, *args, **arguments).arguments
    if not isinstance(dataset, DataLoader):
        return given
    return {**_arguments_of(dataset), **given, "dataset": dataset.dataset}


def _arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    asked = {name: getattr(loader, name) for name in (*names, *NEEDS_WORKERS, "in_order")}
    return asked | batching_of(loader, LoaderConfig())
