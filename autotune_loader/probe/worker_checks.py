"""Short looks at whether several workers may read a dataset at all, before any of their rates is believed.

Each is a canary: what it cannot find out (an error, a hang) counts as no trouble, since a burst with a deadline finds it too.
So is the look at a dataset that is its own iterator: some only look like one that cannot begin again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.digest import Leaf, digest
from autotune_loader.pipeline.look import look, shown
from autotune_loader.pipeline.reading import Reading, seed_everything
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.burst import OpenLoader
from autotune_loader.probe.first_batches import FirstBatch
from autotune_loader.probe.forking import in_fork
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.secrets import without_secrets

log = logging.getLogger(__name__)
# The fewest that can differ, and one batch of each is enough.
TWO_WORKERS = LoaderConfig(num_workers=2, prefetch_factor=1)
# A canary that hangs must not end the study, nor take much of its time.
SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR = 5.0, 10.0
# For two samples of a dataset that is its own iterator; whatever takes longer is not found out.
TWO_SAMPLES_DEADLINE_S = 10.0
SHARED_FILE = (
    "{dataset} reads from {file}, which was open before: forked workers would share its position, and training would get wrong "
    "samples without a word, so none are tried (num_workers=0); open it on first use in each process, and not before"
)
BOUND = (
    "{path} is {words}, which works in the process that made it only, so no workers are tried (num_workers=0); make it on "
    "first use in each worker, or in worker_init_fn"
)
UNPICKLABLE_BATCH = (
    "a batch cannot be pickled ({fault}), so no worker could hand it over and none are tried (num_workers=0); tensors, "
    "numbers, and objects of classes at the top level of a module can be"
)
READ_ONCE = (
    "dataset_or_loader={dataset} can be read only once: a second iter() goes on where the first was, so nothing is left for a "
    "second epoch; an IterableDataset whose __iter__ makes a new iterator would work"
)


def why_no_workers(data: DataSide, first: FirstBatch) -> list[str]:
    """Why workers would get other samples, or none; empty where nothing is known against them.

    Args:
        data: what workers inherit.
        first: a batch that was read in this process.
    """
    if start_method() == "fork":
        if first.moved_file is not None:
            return [SHARED_FILE.format(dataset=type(data.dataset).__qualname__, file=first.moved_file)]
        for path, words in look({"dataset": data.dataset}).bound[:1]:
            return [BOUND.format(path=shown(path), words=words)]
    fault = why_not_pickled(first.batch)
    return [] if fault is None else [UNPICKLABLE_BATCH.format(fault=fault)]


def workers_repeat_each_other(data: DataSide, first_fetch_s: float) -> bool:
    """Whether two workers begin with the very same batch: an IterableDataset that does not share its samples out.

    Their throughput would be counted twice, and training would see every sample as often as there are workers. Both are
    seeded alike, so that it is no excuse that each shuffles or augments in its own way.
    """
    alike = replace(data, worker_init_fn=_SeededAlike(data.worker_init_fn))
    first: dict[int, list[Leaf]] = {}
    try:
        with OpenLoader() as open_loader:
            loader = make_traced_loader(alike, TWO_WORKERS, Reading(alike))
            loader.timeout = max(SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR * first_fetch_s)
            open_loader.open(loader)
            del loader
            for batch, fetch in islice(open_loader.iterator, 2 * TWO_WORKERS.num_workers):
                first.setdefault(fetch[0], digest(batch))
    except Exception as error:
        log.info("the canary for repeated samples found nothing out: %s", without_secrets(str(error)))
        return False
    return len(first) == TWO_WORKERS.num_workers and first[0] == first[1]


class _SeededAlike:
    """Runs the user's own `worker_init_fn`, and then gives every worker the same seed."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        if self._inner is not None:
            self._inner(worker)
        seed_everything(0)
        # It refuses to be changed; datasets with a generator of their own seed that from it.
        object.__setattr__(torch.utils.data.get_worker_info(), "seed", 0)


def goes_on(dataset: Any) -> bool:
    """Whether a second `iter()` goes on where the first was; False where that is not found out.

    Only datasets with `__next__` are looked at. They are read in forks of this process, so that they stay where they are.
    """
    if not isinstance(dataset, Iterator):
        return False
    read = [functools.partial(_two_samples, dataset, anew=anew) for anew in (False, True)]
    in_one_go, anew = (in_fork(each, TWO_SAMPLES_DEADLINE_S) for each in read)
    if not (isinstance(in_one_go, bytes) and isinstance(anew, bytes) and in_one_go and anew):
        log.info("whether the dataset begins again was not found out: %s", (in_one_go, anew))
        return False
    return in_one_go == anew and len(set(in_one_go.splitlines())) == 2


def _two_samples(dataset: Any, *, anew: bool) -> bytes:
    """Digests of two samples, a line each: of one iterator, or the first of two."""
    try:
        seed_everything(0)
        iterator = iter(dataset)
        first = digest(next(iterator))
        second = digest(next(iter(dataset) if anew else iterator))
    except Exception as error:
        log.info("two samples: %s", without_secrets(str(error)))
        return b""
    return b"\n".join(ascii(each).encode() for each in (first, second))
