"""Whether a dataset that is its own iterator begins again when it is asked to: some only look like one that cannot."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

from autotune_loader.pipeline.build import seed_everything
from autotune_loader.pipeline.digest import digest
from autotune_loader.probe.forking import in_fork
from autotune_loader.values.secrets import without_secrets

log = logging.getLogger(__name__)
READ_ONCE = (
    "dataset_or_loader={dataset} can be read only once: a second iter() goes on where the first was, so nothing is left for a "
    "second epoch; an IterableDataset whose __iter__ makes a new iterator would work"
)
DEADLINE_S = 10.0
"""For two samples; whatever takes longer is not found out."""


def goes_on(dataset: Any) -> bool:
    """Whether a second `iter()` goes on where the first was; False where that is not found out.

    Only datasets with `__next__` are looked at. They are read in forks of this process, so that they stay where they are.
    """
    if not isinstance(dataset, Iterator):
        return False
    answers = [in_fork(functools.partial(_two_samples, dataset, anew=anew), DEADLINE_S) for anew in (False, True)]
    in_one_go, anew = (answer if isinstance(answer, bytes) else b"" for answer in answers)
    if not in_one_go or not anew:
        log.info("whether the dataset begins again was not found out: %s", answers)
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
