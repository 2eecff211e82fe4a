"""The arguments of DataLoader that an AutoLoader was given, those of an existing loader beneath them, and what it may do."""

from __future__ import annotations

import difflib
import inspect
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from autotune_loader.pipeline.build import batching_of
from autotune_loader.values import WITHOUT_WORKERS, LoaderConfig

OWN = ("config", "tune", "on_change", "max_workers", "workers")
"""What AutoLoader takes beyond the arguments of DataLoader."""
KNOWN = ("torchdata", "accelerate")
"""Libraries whose loaders make iterators of their own that add nothing to a batch but where it lies."""
CONFIGURED = ("num_workers", "pin_memory", *WITHOUT_WORKERS)
"""Arguments that a configuration takes the place of."""
OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""What says how workers are, if there are any; torch refuses most of it without."""


class Asked(NamedTuple):
    arguments: dict[str, Any]
    """Of DataLoader, by name."""
    may_use_workers: bool
    how: dict[str, Any]
    """Of `OF_WORKERS`, where no number was asked for."""


def asked_for(
    dataset: Any,
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    config: LoaderConfig | None = None,
    *,
    workers: bool | None = None,
) -> Asked:
    """What DataLoader is to be made with.

    Args:
        dataset: any dataset, or a loader, which is only read.
        args: positional arguments after it.
        arguments: by name.
        config: in place of what they say of workers.
        workers: whether workers may be used; None: unless 0 of them were asked for.

    Raises:
        TypeError: DataLoader has no such argument.
    """
    signature = inspect.signature(DataLoader)
    for name in arguments.keys() - signature.parameters.keys():
        near = difflib.get_close_matches(name, [*signature.parameters, *OWN], n=1) or signature.parameters
        wrong = f"{name}={arguments[name]!r} is an argument of neither AutoLoader nor DataLoader"
        raise TypeError(f"{wrong}; {' or '.join(near)} would work")
    given = signature.bind(dataset, *args, **arguments).arguments
    if isinstance(dataset, DataLoader):
        given = {**_arguments_of(dataset, given), **given, "dataset": dataset.dataset}
    if config is not None:
        of_workers = {name: value for name, value in config.to_kwargs().items() if name in CONFIGURED}
        given = {name: value for name, value in given.items() if name not in CONFIGURED} | of_workers
    if given.get("num_workers"):
        return Asked(given, True, {})
    may = "num_workers" not in given if workers is None else workers
    return Asked(given, may, {name: given.pop(name) for name in OF_WORKERS if may and given.get(name)})


def _arguments_of(loader: DataLoader[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those that a loader was made with; of workers nothing where torch refuses or ignores it, as there are none."""
    kind, name = type(loader), type(loader).__name__
    if kind.__iter__ is not DataLoader.__iter__ and kind.__module__.partition(".")[0] not in KNOWN:
        raise TypeError(
            f"{name} makes iterators of its own, which AutoLoader({name}(...)) would leave out; "
            f"AutoLoader as the base class of {name}, in place of DataLoader, would work"
        )
    names: tuple[str, ...] = ("num_workers", "pin_memory", "collate_fn", "timeout", "worker_init_fn", "generator")
    if given.get("num_workers", loader.num_workers) and loader.num_workers:
        names += tuple(WITHOUT_WORKERS)
    return batching_of(loader, LoaderConfig()) | {name: getattr(loader, name) for name in names}
