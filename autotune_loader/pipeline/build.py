"""The only place that builds a DataLoader. One that somebody holds is never changed: `rebuild` makes another one like it."""

from __future__ import annotations

import copy
import inspect
import warnings
from inspect import Parameter
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig


def build_loader(dataset: Any, config: LoaderConfig, *, loader_class: type[Any] = DataLoader, **arguments: Any) -> Any:
    """A loader over `dataset` with a configuration; further arguments of the loader win over it.

    Args:
        dataset: any dataset that DataLoader takes.
        config: as tuned.
        loader_class: `DataLoader`, or a class that takes the same arguments.
        **arguments: of that class, such as `shuffle=True`.
    """
    tuned = config.to_kwargs()
    if arguments.get("num_workers") == 0:
        tuned = {name: value for name, value in tuned.items() if name == "pin_memory"}
    merged = {**tuned, **arguments}
    if merged.get("batch_sampler") is not None or merged.get("batch_size", 1) is None:
        merged.pop("drop_last", None)
    with warnings.catch_warnings():
        # Where workers wait more of them than cores are right, and that was measured.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        return loader_class(dataset, **merged)


def rebuild(loader: Any, config: LoaderConfig) -> Any:
    """A loader like `loader`, over the same dataset and in the same order, with the tuned arguments.

    Args:
        loader: a `torch.utils.data.DataLoader`, or of a class made from it, which it stays, with its own arguments.
        config: as `tune()` chose it. A tuned batch size is used where the loader makes its own batches.

    Raises:
        ValueError: a batch size was tuned, but this loader has a sampler of batches, which decides it.
    """
    parts = {name: getattr(loader, name) for name in ("collate_fn", "worker_init_fn", "generator", "timeout")}
    # A class that is called with nothing but what DataLoader takes may keep what runs: it is made anew.
    takes = {each.kind for each in inspect.signature(type(loader)).parameters.values()}
    kind = type(loader) if takes == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} else DataLoader
    made = build_loader(loader.dataset, config, loader_class=kind, **parts, **batching_of(loader, config))
    if type(made) is type(loader):
        return made
    # One with arguments of its own is the loader itself, once more, with what is tuned as in `made`.
    changed = copy.copy(loader)
    tuned = {name: value for name, value in vars(made).items() if name not in ("dataset", "sampler", *parts)}
    running = {name: None for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)}
    context = [name for name in vars(loader) if name.endswith("__multiprocessing_context")]
    # Past DataLoader's guard of what must not change once there are workers.
    vars(changed).update(tuned, **running, **dict.fromkeys(context, made.multiprocessing_context))
    return changed


def batching_of(loader: Any, config: LoaderConfig) -> dict[str, Any]:
    """The arguments by which a loader makes its batches, with the size that was tuned, if any was.

    Raises:
        ValueError: as `rebuild`.
    """
    data = DataSide.from_loader(loader)
    if data.batch_sampler is None:
        size = data.batch_size and (config.batch_size or data.batch_size)
        return {"batch_size": size, "sampler": data.sampler, "drop_last": data.drop_last}
    if config.batch_size is not None:
        raise ValueError(
            f"batch_size={config.batch_size} was tuned, but a batch_sampler decides it; batch_size=None would work"
        )
    return {"batch_sampler": data.batch_sampler}
