"""One loader of a script, over all its epochs: what it is, what its batches were, and what runs in its place."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any

from autotune_loader.pipeline.site import Site
from autotune_loader.pipeline.workload import DataSide, length_of
from autotune_loader.results.result import TuningResult
from autotune_loader.scripts.batch_log import BatchLog
from autotune_loader.scripts.findings import Findings, findings_of
from autotune_loader.values.config import LoaderConfig


class ScriptLoader:
    """A loader as people know it: by the line that makes it, however often it is made anew; it is not kept alive.

    One line may make several: the names in `taken` are those of others.
    """

    def __init__(self, site: Site, loader: Any, taken: Collection[str]) -> None:
        kind = f"{site.line} {site.dataset}"
        names = itertools.chain((str(site.line), kind), (f"{kind} {number}" for number in itertools.count(2)))
        self.site, self.name = site, next(name for name in names if name not in taken)
        self.log, self.own = BatchLog(), LoaderConfig.from_loader(loader)
        self.why_not: str | None = None
        """Why its workers stay as they are; None where they may be changed."""
        self.tuned: Any = None
        """What AutoLoader has learnt of it: (state, tuning)."""
        self._has_batched_fetch = hasattr(getattr(loader, "dataset", None), "__getitems__")
        batches = getattr(loader, "batch_sampler", None)
        self._epoch_batches = length_of(getattr(loader, "sampler", None) if batches is None else batches)
        self._owner = weakref.ref(loader)

    def is_of(self, site: Site, loader: Any) -> bool:
        """Whether this loader is the one it was, or takes its place; whose settings were set anew is another one."""
        owner = self._owner()
        if LoaderConfig.from_loader(loader) != self.own:
            return False
        if owner is loader:
            return True
        if site != self.site or (owner is not None and self.log.running):
            return False
        self._owner = weakref.ref(loader)
        return True

    @property
    def config(self) -> LoaderConfig:
        """What it runs with now, or has settled on."""
        best: LoaderConfig = self.own if self.tuned is None else self.tuned[1].tuner.best
        return best

    @property
    def refusal(self) -> tuple[str | None, str | None]:
        """Why no other number of workers is tried, and what would allow it; None where they are, or nobody knows."""
        refused = None if self.tuned is None else self.tuned[0].refusal
        return (self.why_not, None) if refused is None else (refused.reason, refused.mend)

    @property
    def is_settled(self) -> bool:
        """Whether tuning has come to an end, and was looked at once more."""
        tuner = None if self.tuned is None else self.tuned[1].tuner
        return tuner is not None and tuner.is_settled and tuner.is_confirmed

    @property
    def findings(self) -> Findings:
        """What its batches tell."""
        if self.tuned is None:
            return findings_of(self.log, self.site, self.own, self._epoch_batches)
        result: TuningResult = self.tuned[1].result(site=self.site, has_batched_fetch=self._has_batched_fetch)
        return Findings(result if result.trials else None)


def why_not(loader: Any) -> str | None:
    """Why torch's own iterator is needed for a loader, whose workers are left as they are then; None where it is not.

    Only what can be seen without fetching anything.
    """
    from multiprocessing import current_process

    from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return f"{kind.__name__} makes iterators of its own"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "a data pipe carries a configuration of its own into the workers"
    if isinstance(loader.dataset, IterableDataset):
        return "the samples of an IterableDataset depend on the number of workers"
    data = DataSide.from_loader(loader)
    if data.has_epochs:
        return "its dataset knows the epoch, and workers have copies of it that may not be told"
    if data.reads_by_itself:
        return "its dataset runs a loader of its own"
    return "this process is daemonic and may not have workers" if current_process().daemon else None
