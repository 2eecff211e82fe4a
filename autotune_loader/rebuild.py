"""The same loader with another configuration: what a framework holds is rebuilt, never changed in place."""

from __future__ import annotations

from typing import Any

from autotune_loader.config import LoaderConfig


def rebuild(loader: Any, config: LoaderConfig) -> Any:
    """A loader like `loader`, over the same dataset and in the same order, with the tuned arguments.

    Args:
        loader: a `torch.utils.data.DataLoader`, or torchdata's `StatefulDataLoader`, which stays one.
        config: as `tune()` chose it. A tuned batch size is used where the loader makes its own batches.

    Raises:
        ValueError: a batch size was tuned, but this loader has a sampler of batches, which decides it.
    """
    arguments = {**_own_parts(loader), **_batching(loader, config), **config.to_kwargs()}
    if "batch_size" not in arguments or arguments["batch_size"] is None:
        arguments.pop("drop_last", None)
    return type(loader)(loader.dataset, **arguments)


def _own_parts(loader: Any) -> dict[str, Any]:
    names = ["collate_fn", "worker_init_fn", "generator", "timeout"]
    names += [name for name in ("snapshot_every_n_steps",) if hasattr(loader, name)]
    return {name: getattr(loader, name) for name in names}


def _batching(loader: Any, config: LoaderConfig) -> dict[str, Any]:
    from torch.utils.data import BatchSampler, IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": config.batch_size or loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is None:
        return {"batch_size": None, "sampler": loader.sampler}
    if loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler:
        size = config.batch_size or loader.batch_size
        return {"batch_size": size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    if config.batch_size is not None:
        raise ValueError(
            f"batch_size={config.batch_size} was tuned, but a batch_sampler decides it; batch_size=None would work"
        )
    return {"batch_sampler": loader.batch_sampler}
