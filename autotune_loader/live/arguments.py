"""The arguments of DataLoader that an AutoLoader was given, those of an existing loader beneath them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from typing import Any

from torch.utils.data import DataLoader

from autotune_loader.pipeline.build import batching_of
from autotune_loader.values.config import LoaderConfig

WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order")
"""Arguments of an existing loader that torch refuses, or ignores, without workers."""
CONFIGURED = ("num_workers", "pin_memory", *WORKERS)
"""Arguments that a configuration takes the place of."""


def asked_for(
    dataset: Any,
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    config: LoaderConfig | None = None,
    own: Collection[str] = (),
) -> dict[str, Any]:
    """Arguments of DataLoader by name.

    Args:
        dataset: any dataset, or a loader, which is only read.
        args: positional arguments after it.
        arguments: by name.
        config: in place of what they say of workers.
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
    if isinstance(dataset, DataLoader):
        given = {**_arguments_of(dataset, given), **given, "dataset": dataset.dataset}
    if config is not None:
        given = {name: value for name, value in given.items() if name not in CONFIGURED} | _of_workers(config)
    return given


def _arguments_of(loader: DataLoader[Any], given: dict[str, Any]) -> dict[str, Any]:
    names: tuple[str, ...] = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    if given.get("num_workers", loader.num_workers) and loader.num_workers:
        names += WORKERS
    return {name: getattr(loader, name) for name in names} | batching_of(loader, LoaderConfig())


def _of_workers(config: LoaderConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_kwargs().items() if name in CONFIGURED}
