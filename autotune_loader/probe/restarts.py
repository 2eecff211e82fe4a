"""Whether a dataset that is its own iterator begins again when it is asked to: some only look like one that cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from autotune_loader.pipeline.build import seed_everything
from autotune_loader.pipeline.digest import digest
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.secrets import without_secrets

log = logging.getLogger(__name__)
READ_ONCE = (
    "dataset_or_loader={dataset} can be read only once: a second iter() goes on where the first was, so nothing is left for a "
    "second epoch; an IterableDataset whose __iter__ makes a new iterator would work"
)


def goes_on(dataset: Any, fresh: Callable[[], DataSide]) -> bool:
    """Whether a second `iter()` goes on where the first was. Only datasets with `__next__` are looked at.

    Args:
        dataset: tells whether it has to be found out; it is not read.
        fresh: gives another copy of its data side each time, which may take as long as the dataset is large.
    """
    if not isinstance(dataset, Iterator):
        return False
    try:
        seed_everything(0)
        in_one_go = iter(fresh().dataset)
        expected = [digest(next(in_one_go)) for _ in range(2)]
        seed_everything(0)
        other: Any = fresh().dataset
        seen = [digest(next(iter(other))) for _ in range(2)]
    except Exception as error:
        log.info("whether the dataset begins again was not found out: %s", without_secrets(str(error)))
        return False
    return seen == expected and expected[0] != expected[1]
