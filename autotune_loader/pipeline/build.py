"""The only place that builds a DataLoader: plain ones for training, rebuilt ones for frameworks, traced ones for the probe.

A loader that somebody holds is never changed: `rebuild` makes another one like it.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from inspect import Parameter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.pipeline.reading import Reading, seed_everything
from autotune_loader.pipeline.tracing import (
    EndlessIterable,
    OnError,
    TracedCollate,
    TracedDataset,
    TracedWorkerInit,
    reraise,
)
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig


def build_loader(
    dataset: Any, config: LoaderConfig | None = None, *, loader_class: type[Any] = DataLoader, **arguments: Any
) -> Any:
    """A loader over `dataset` with a configuration; further arguments of the loader win over it.

    Args:
        dataset: any dataset that DataLoader takes.
        config: as tuned; None for torch's defaults.
        loader_class: `DataLoader`, or a class that takes the same arguments.
        **arguments: of that class, such as `shuffle=True`.
    """
    tuned = config.to_kwargs() if config is not None else {}
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
    kind = type(loader) if _passes_on(type(loader)) else DataLoader
    made = build_loader(loader.dataset, config, loader_class=kind, **parts, **batching_of(loader, config))
    return made if type(made) is type(loader) else _changed_copy(loader, made)


def _passes_on(kind: type) -> bool:
    """Whether a class is called with nothing but what DataLoader takes: it may keep what runs, and is made anew."""
    return {each.kind for each in inspect.signature(kind).parameters.values()} == {
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    }


def _changed_copy(loader: Any, made: DataLoader[Any]) -> Any:
    """The loader itself, once more, with what is tuned as in `made`: for classes with arguments of their own."""
    changed = copy.copy(loader)
    users = ("dataset", "collate_fn", "worker_init_fn", "generator", "timeout", "sampler")
    tuned = {name: value for name, value in vars(made).items() if name not in users}
    running = {name: None for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)}
    context = {
        name: made.multiprocessing_context for name in vars(loader) if name.endswith("__multiprocessing_context")
    }
    # Past DataLoader's guard of what must not change once there are workers.
    vars(changed).update(tuned, **running, **context)
    return changed


def batching_of(loader: Any, config: LoaderConfig) -> dict[str, Any]:
    """The arguments by which a loader makes its batches, with the size that was tuned, if any was.

    Raises:
        ValueError: as `rebuild`.
    """
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": config.batch_size or loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is None:
        return {"batch_size": None, "sampler": loader.sampler}
    if loader.batch_size is not None:
        size = config.batch_size or loader.batch_size
        return {"batch_size": size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    if config.batch_size is not None:
        raise ValueError(
            f"batch_size={config.batch_size} was tuned, but a batch_sampler decides it; batch_size=None would work"
        )
    return {"batch_sampler": loader.batch_sampler}


def make_traced_loader(
    data: DataSide, config: LoaderConfig, reading: Reading, *, stages: bool = False, on_error: OnError = reraise
) -> DataLoader[Any]:
    """A DataLoader of the user's parts that never ends and whose batches carry their history.

    Args:
        data: the user's parts; they are used, not copied.
        config: what to tune.
        reading: of the run; which samples are read is its business.
        stages: whether workers are watched for where the time of a sample goes.
        on_error: what becomes of an exception of the dataset or of the collate function.
    """
    seed = reading.begin(data.dataset)
    seed_everything(seed)
    batched, size = data.is_batched, config.batch_size or data.batch_size
    parts: dict[str, Any] = {
        "collate_fn": TracedCollate(data.collate, batched, on_error),
        "worker_init_fn": TracedWorkerInit(data.worker_init_fn, stages),
        # Torch draws a seed for the workers with it, on the default device.
        "generator": data.generator or torch.Generator(torch.get_default_device()).manual_seed(seed),
    }
    if data.is_iterable:
        dataset: Any = EndlessIterable(data.dataset, on_error)
        parts |= {"batch_size": size, "drop_last": data.drop_last}
    else:
        dataset, order = TracedDataset(data.dataset, on_error), reading.batches(size)
        parts |= {"batch_sampler": order} if batched else {"sampler": order, "batch_size": None}
    loader: DataLoader[Any] = build_loader(dataset, config, **parts)
    return loader
