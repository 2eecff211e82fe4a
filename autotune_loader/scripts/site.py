"""One loader of a script, as people know it: by the line that makes it, however often it is made anew."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, RandomSampler

from autotune_loader.live.budgets import Budgets
from autotune_loader.live.result import LoaderFacts
from autotune_loader.live.state import LoaderState
from autotune_loader.live.tuner import Job
from autotune_loader.live.tuning import Announcer, LiveTuning, cores_within
from autotune_loader.pipeline.workload import length_of
from autotune_loader.results.result import TuningResult
from autotune_loader.scripts.tally import Tally
from autotune_loader.scripts.watching import History, Record, can_carry_history
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import Line


class Contents(NamedTuple):
    """What a loader holds, as far as it can be told without reading from it."""

    dataset: str
    samples: int | None
    batch_size: int | None
    is_shuffled: bool

    @classmethod
    def of(cls, loader: Any) -> Contents:
        dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
        while (inner := getattr(batches, "batch_sampler", None)) is not None:  # as Accelerate shards them
            batches = inner
        sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
        is_shuffled = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True
        return cls(type(dataset).__name__, length_of(dataset), size if isinstance(size, int) else None, is_shuffled)

    def __str__(self) -> str:
        length = "" if self.samples is None else f"[{self.samples}]"
        size = "" if self.batch_size is None else f", batches of {self.batch_size}"
        return f"{self.dataset}{length}{size}{', shuffled' if self.is_shuffled else ''}"


class Site:
    """A loader of the script, over all its epochs.

    Args:
        line: of the user's code.
        loader: the first that was iterated; it is not kept alive.
        taken: names of the other loaders, of which one line may make several.
    """

    def __init__(self, line: Line, loader: Any, taken: Collection[str]) -> None:
        self.line, self.contents = line, Contents.of(loader)
        kind = f"{line} {self.contents.dataset}"
        names = itertools.chain((str(line), kind), (f"{kind} {number}" for number in itertools.count(2)))
        self.name = next(name for name in names if name not in taken)
        self.tally = Tally()
        self.own = LoaderConfig.from_loader(loader)
        self.why_not: str | None = None
        """Why it may not be tuned."""
        self.state: LoaderState | None = None
        self.tuning: LiveTuning | None = None
        self.facts = LoaderFacts(
            batch_size=self.contents.batch_size,
            dataset=self.contents.dataset,
            has_batched_fetch=hasattr(getattr(loader, "dataset", None), "__getitems__"),
        )
        self.is_tuned = False
        self._owner = weakref.ref(loader)
        self._epoch_batches = length_of(loader)

    def is_of(self, loader: Any) -> bool:
        """Whether this loader is the one it was, or takes its place."""
        owner = self._owner()
        if owner is None or (owner is not loader and not self.tally.is_under_way):
            self._owner = weakref.ref(loader)
            return True
        return owner is loader

    def record(self, loader: Any) -> Record:
        """Where an iterator that is only watched tells of its batches."""
        if not (isinstance(loader, DataLoader) and can_carry_history(loader)):
            return Record(self.tally)
        if self.state is None:
            self.state = LoaderState(asked=self.own, config=self.own, budgets=Budgets())
            job = Job(start=self.own, usable_cores=cores_within(None), epoch_batches=self._epoch_batches, is_fixed=True)
            self.tuning = LiveTuning(self.state, self._stay, job, on_change=Announcer(None, None))
        return History(self.tally, self.state)

    @property
    def config(self) -> LoaderConfig:
        """What it runs with now, or has settled on."""
        return self.tuning.tuner.best if self.tuning is not None and self.is_tuned else self.own

    def result(self) -> TuningResult | None:
        """What is known of it; None where its batches told nothing."""
        if self.tuning is None or self.tuning.tuner.beliefs is None:
            return None
        return self.tuning.result(config=self.config, facts=self.facts)

    def _stay(self, config: LoaderConfig) -> None:
        """A loader that is watched changes nothing."""
