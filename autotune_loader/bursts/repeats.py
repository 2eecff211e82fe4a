"""Whether the workers of a stream repeat each other."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from autotune_loader.bursts.loop import OpenLoader
from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.equal import is_equal
from autotune_loader.pipeline.reading import Reading, seed_everything
from autotune_loader.pipeline.tracing import make_traced_loader
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig

TWO_WORKERS = LoaderConfig(num_workers=2, prefetch_factor=1)
SHORTEST_TIMEOUT_S, SPAWNED_TIMEOUT_S, TIMEOUT_FACTOR = 5.0, 60.0, 10.0
"""For a batch of two workers that may repeat each other. A spawned one imports torch first."""


def workers_repeat_each_other(data: DataSide, first_fetch_s: float) -> bool:
    """Whether two workers begin with the very same batch: an IterableDataset that does not share its samples out.

    Both are seeded alike, so that shuffling and augmentation do not differ. What raises in them is left to a burst to say.
    """
    inner = data.worker_init_fn

    def begin_alike(worker: int) -> None:
        if inner is not None:
            inner(worker)
        seed_everything(0)
        info: Any = torch.utils.data.get_worker_info()
        object.__setattr__(info, "seed", 0)  # datasets with a generator of their own seed that from it

    alike, first = replace(data, worker_init_fn=begin_alike), dict[int, Any]()
    with suppress(Exception), OpenLoader() as open_loader:
        loader = make_traced_loader(alike, TWO_WORKERS, Reading(alike))
        is_forked = start_method(data.multiprocessing_context) == "fork"
        shortest_s = SHORTEST_TIMEOUT_S if is_forked else SPAWNED_TIMEOUT_S
        loader.timeout = max(shortest_s, TIMEOUT_FACTOR * first_fetch_s)
        for handed in islice(open_loader.open(loader), 2 * TWO_WORKERS.num_workers):
            first.setdefault(handed.fetch[0], handed.batch)
    return len(first) == TWO_WORKERS.num_workers and are_repeated(*first.values())


def are_repeated(one: Any, other: Any) -> bool:
    """Whether the batches of two workers are equal, as far as can be seen: what cannot be compared is taken to be."""
    try:
        return is_equal(one, other)
    except Exception:  # one worker too few costs time, one too many repeats samples without a word
        return True
