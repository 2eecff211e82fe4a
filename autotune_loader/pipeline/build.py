"""The only place that builds a DataLoader. One that somebody holds is never changed: `rebuild` makes another one like it."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from threading import Thread
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import WITHOUT_WORKERS, LoaderConfig

OF_WORKERS = (*WITHOUT_WORKERS, "timeout")
"""Arguments that torch refuses, or that say nothing, where there are no workers."""
SETTINGS = ("num_workers", "pin_memory", *OF_WORKERS, "_iterator", "_IterableDataset_len_called")
"""Attributes of a DataLoader that follow from its configuration; its start method has another name."""
OWN_BATCHES = "batch_size={size} was tuned, but a batch_sampler decides it. Try batch_size=None."
RUNNING = (
    "{kind}.{name} runs with the settings that the loader was made with. Try {kind}(..., **result.best.to_kwargs())."
)


@contextlib.contextmanager
def _more_workers_than_cores() -> Iterator[None]:
    """Where workers wait more of them are right, and that was measured: torch does not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


@_more_workers_than_cores()
def build_loader(dataset: Any, config: LoaderConfig, **arguments: Any) -> DataLoader[Any]:
    """A loader with a configuration; further arguments of DataLoader win over it, and those for workers need workers."""
    merged = {**config.to_kwargs(), **arguments}
    if not merged["num_workers"]:
        merged = {name: value for name, value in merged.items() if name not in OF_WORKERS}
    if merged.get("batch_sampler") is not None or merged.get("batch_size", 1) is None:
        merged.pop("drop_last", None)
    return DataLoader(dataset, **merged)


@_more_workers_than_cores()
def rebuild(loader: Any, config: LoaderConfig) -> Any:
    """The loader once more, with the tuned settings: its class, and all that it was made with or given, stay.

    An iterator that it keeps is begun anew.

    Raises:
        ValueError: a batch size was tuned, but a sampler of batches decides it; or the loader keeps something else that runs.
    """
    changed = copy.copy(loader)
    _set(changed, config)
    # Where Lightning has noted the arguments of a loader it makes another one of them, as for DDP, and then does with that
    # what it has noted here, too.
    noted = {name: copy.copy(value) for name, value in vars(loader).items() if name.startswith("__pl_")}
    if noted:
        vars(changed).update({**noted, "__pl_attrs_record": [*noted.get("__pl_attrs_record", ()), ((config,), _set)]})
    return changed


def _set(loader: Any, config: LoaderConfig) -> None:
    """Give a loader that nobody else holds its settings."""
    made = build_loader(loader.dataset, config, timeout=loader.timeout, **batching_of(loader, config))
    held = dict(vars(loader))
    # Past DataLoader's guard of what must not change once there are workers, and past what Lightning notes meanwhile.
    own = vars(loader)
    own.update({name: value for name, value in vars(made).items() if name in SETTINGS})
    context = [name for name in held if name.endswith("__multiprocessing_context")]
    own.update(dict.fromkeys(context, made.multiprocessing_context))
    if config.batch_size is not None and loader.batch_size is not None:
        own.update(batch_size=config.batch_size, batch_sampler=_resized(loader.batch_sampler, config.batch_size))
    for name in held.keys() - vars(made).keys():
        value = held[name]
        if isinstance(value, _BaseDataLoaderIter):
            own[name] = loader._get_iterator()
        elif isinstance(value, DataLoader) and value.dataset is loader.dataset:
            own[name] = rebuild(value, config)
        elif isinstance(value, (Iterator, Thread)):
            raise ValueError(RUNNING.format(kind=type(loader).__name__, name=name))


def _resized(batches: Any, size: int) -> Any:
    """A sampler of batches with batches of another size; also one that repeats those of another."""
    parts = {name: each for name, each in getattr(batches, "__dict__", {}).items() if isinstance(each, BatchSampler)}
    if not isinstance(batches, BatchSampler) and not parts:
        raise ValueError(OWN_BATCHES.format(size=size))
    changed = copy.copy(batches)
    own = {"batch_size": size} if isinstance(batches, BatchSampler) else {}
    vars(changed).update(own, **{name: _resized(each, size) for name, each in parts.items()})
    return changed


def batching_of(loader: Any, config: LoaderConfig) -> dict[str, Any]:
    """The arguments by which a loader makes its batches, with the size that was tuned, if any was; raises as `rebuild`."""
    data = DataSide.from_loader(loader)
    if data.batch_sampler is None:
        size = data.batch_size and (config.batch_size or data.batch_size)
        return {"batch_size": size, "sampler": data.sampler, "drop_last": data.drop_last}
    if config.batch_size is not None:
        raise ValueError(OWN_BATCHES.format(size=config.batch_size))
    return {"batch_sampler": data.batch_sampler}
