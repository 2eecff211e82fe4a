"""Short looks at whether several workers may read a dataset at all, before any of their rates is believed.

What a look cannot find out (an error, a hang) counts as no trouble, since a burst with a deadline finds it too.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from autotune_loader.bursts.loop import OpenLoader
from autotune_loader.machine.elsewhere import FIRST_OWN_FD, descriptors
from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.batches import tensors_in
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.reading import Reading, seed_everything
from autotune_loader.pipeline.workload import DataSide, wrapped_datasets
from autotune_loader.values.config import LoaderConfig

log = logging.getLogger(__name__)
TWO_WORKERS = LoaderConfig(num_workers=2, prefetch_factor=1)
"""The fewest that can differ, and one batch of each is enough."""
SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR = 5.0, 10.0
"""A look that hangs must not end the study, nor take much of its time."""
HANDLES = {
    "lmdb.Environment": "an open LMDB environment",
    "environment_t.Environment": "an open LMDB environment",
    "h5py._hl.files.File": "an open HDF5 file",
    "netCDF4._netCDF4.Dataset": "an open NetCDF file",
    "sqlite3.Connection": "a database connection",
}
"""What forked workers would share, to each other's harm, by the class that a dataset's attribute has. Other open files are seen
by their positions."""
SHARED_FILE = (
    "{dataset} reads from {file}, which was open before: forked workers would share its position, and training would get wrong "
    "samples without a word, so none are tried (num_workers=0). Open it on first use in each process, and not before."
)
HANDLE = (
    "dataset.{name} is {words}, which forked workers would share, so none are tried (num_workers=0). Make it on first use in "
    "each worker, or in worker_init_fn."
)
UNPICKLABLE_BATCH = (
    "A batch cannot be pickled ({fault}), so no worker could hand it over and none are tried (num_workers=0). Tensors, "
    "numbers, and objects of classes at the top level of a module can be."
)
REPEATED_SAMPLES = (
    "Every worker of this IterableDataset delivers the same samples if it is seeded alike, so at most 1 worker is used. Share "
    "them out in __iter__ by torch.utils.data.get_worker_info().id."
)


def positions() -> dict[int, tuple[int, int, int]]:
    """Device, inode and position of the open regular files of this process, by their numbers."""
    found: dict[int, tuple[int, int, int]] = {}
    for fd in descriptors(FIRST_OWN_FD):
        with suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                found[fd] = status.st_dev, status.st_ino, os.lseek(fd, 0, os.SEEK_CUR)
    return found


def why_no_workers(data: DataSide, batch: Any, before: dict[int, tuple[int, int, int]]) -> list[str]:
    """Why workers would get other samples, or none; empty where nothing is known against them.

    Args:
        data: what was read from.
        batch: the first one.
        before: positions of open files before it was read.
    """
    if start_method() == "fork":
        after = positions()
        for fd, (device, inode, at) in before.items():
            if after.get(fd, ())[:2] == (device, inode) and after[fd][2] != at:
                name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
                return [SHARED_FILE.format(dataset=type(data.dataset).__qualname__, file=name)]
        for dataset in wrapped_datasets(data.dataset):
            for name, value in list(getattr(dataset, "__dict__", {}).items()):
                kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__)
                if (words := next((HANDLES[kind] for kind in kinds if kind in HANDLES), None)) is not None:
                    return [HANDLE.format(name=name, words=words)]
    fault = why_not_pickled(batch)
    return [] if fault is None else [UNPICKLABLE_BATCH.format(fault=fault)]


def workers_repeat_each_other(data: DataSide, first_fetch_s: float) -> bool:
    """Whether two workers begin with the very same batch: an IterableDataset that does not share its samples out.

    Their throughput would be counted twice, and training would see every sample as often as there are workers. Both are
    seeded alike, so that it is no excuse that each shuffles or augments in its own way.
    """
    alike = replace(data, worker_init_fn=_SeededAlike(data.worker_init_fn))
    first: dict[int, Any] = {}
    try:
        with OpenLoader() as open_loader:
            loader = make_traced_loader(alike, TWO_WORKERS, Reading(alike))
            loader.timeout = max(SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR * first_fetch_s)
            open_loader.open(loader)
            del loader
            for batch, fetch in islice(open_loader.iterator, 2 * TWO_WORKERS.num_workers):
                first.setdefault(fetch[0], batch)
    except Exception as error:
        log.info("the look for repeated samples found nothing out: %s", error)
        return False
    return len(first) == TWO_WORKERS.num_workers and _is_same(first[0], first[1])


def _is_same(one: Any, other: Any) -> bool:
    """Whether two batches hold equal tensors; without any, whether they are written alike."""
    ours, theirs = list(tensors_in(one)), list(tensors_in(other))
    if not ours or len(ours) != len(theirs):
        return not theirs and repr(one) == repr(other)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class _SeededAlike:
    """Runs the user's own `worker_init_fn`, and then gives every worker the same seed."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        if self._inner is not None:
            self._inner(worker)
        seed_everything(0)
        info: Any = torch.utils.data.get_worker_info()
        object.__setattr__(info, "seed", 0)  # datasets with a generator of their own seed that from it
