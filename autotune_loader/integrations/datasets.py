"""Hugging Face `datasets`: map-style and iterable ones go into `tune()` as they are; here is what they need before.

result = tune(as_tensors(dataset), model, batch_size=32)                   # map-style: random access
result = tune(as_shards(dataset), model, batch_size=32)                    # iterable: at most one worker per shard
"""

from __future__ import annotations

import os
from typing import Any

from autotune_loader.integrations import require


def as_tensors(dataset: Any) -> Any:
    """The dataset in torch format, unless it has a format already: without one it hands out Python lists."""
    require("datasets", feature="Tuning Hugging Face datasets", extra="datasets")
    known = getattr(dataset, "format", None)
    formatted = (
        known["type"] is not None if isinstance(known, dict) else getattr(dataset, "_formatting", None) is not None
    )
    return dataset if formatted else dataset.with_format("torch")


def as_shards(dataset: Any, num_shards: int | None = None) -> Any:
    """A map-style dataset as an iterable one in torch format, in as many shards as workers could be worth.

    Args:
        dataset: a `datasets.Dataset`.
        num_shards: how many; twice the cores of the machine if None. With several ranks, a multiple of their number.

    Raises:
        MissingExtraError: datasets is not installed.
        TypeError: it is iterable already; its shards are what they are.
    """
    module = require("datasets", feature="Tuning Hugging Face datasets", extra="datasets")
    if not isinstance(dataset, module.Dataset):
        shards = getattr(dataset, "num_shards", "?")
        raise TypeError(
            f"dataset={type(dataset).__name__} is iterable already, with {shards} shards; as_tensors() would work"
        )
    # Every worker needs shards of its own; twice the cores leaves the tuner room, and divides well.
    wanted = num_shards or 2 * (os.cpu_count() or 1)
    return as_tensors(dataset.to_iterable_dataset(num_shards=max(1, min(wanted, len(dataset)))))
