"""What all iterators of one loader share; and in it: may its batches come from workers? Asked once, then looked after.

first fetch   what it makes ready (a file that is opened) is noted, so that workers begin without it
4 fetches     watched: what they change or write, only the training process may
workers       8 batches, then the 16th, 32nd ... are compared with the loop's own
each batch    has the training changed what workers have a copy of?
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from autotune_loader.autoloader.comparison import FIRST, WATCHED, difference, is_due, watching_files
from autotune_loader.autoloader.parts import Noted, Parts, Undo
from autotune_loader.autoloader.result import Found
from autotune_loader.autoloader.seeds import Seeds
from autotune_loader.autoloader.work import Sent
from autotune_loader.autoloader.workers import Workers
from autotune_loader.diagnosis import Kept
from autotune_loader.results.record import Finding


class Proof:
    """What is known of one loader's data.

    Args:
        named: dataset, collate function and samplers, by the names that people know them by.
        found: told what speaks against workers; where the script asked for some, fetches of the loop leave nothing behind.
    """

    def __init__(self, named: dict[str, Any], found: Found) -> None:
        self._named, self._found, self._is_asked = named, found, found.is_asked
        self.undo = Undo()
        self.watched = self.compared = self._delivered = 0
        self._parts = Parts(named)
        self._seen: Noted | None = None
        self._whole: Noted | None = None
        self._first_watched: Noted | None = None
        self.has_fetched = False

    @property
    def is_watched(self) -> bool:
        """Whether enough fetches of the loop were watched for workers to start."""
        return self._is_asked or self.watched >= WATCHED

    @property
    def is_done(self) -> bool:
        """Whether workers' batches were shown to be the loop's own."""
        return self._found.refused is None and self.compared >= FIRST

    @property
    def allows_another(self) -> bool:
        """Whether another number of workers than the one asked for may run already."""
        return self.is_done if self._is_asked else self._found.refused is None and self.is_watched

    def first(self, make: Callable[[], Any]) -> Any:
        self.has_fetched, before = True, self._parts.noted()
        try:
            return make()
        finally:
            self.undo.add(before)
            self._parts = Parts(self._named)

    def watch(self, make: Callable[[], Any]) -> Any:
        """A fetch of the loop before workers start."""
        before, self.watched = self._parts.noted(), self.watched + 1
        self._first_watched = self._first_watched or before
        with watching_files() as files:
            try:
                made = make()
            finally:
                self.undo.add(before)
                if (what := before.changed()) is not None:
                    self._found.refuse(Kept.DATASET_CHANGES(what=what))
        if files.found is not None:
            self._found.refuse(Kept.WRITES_FILES(path=files.found))
        if self.watched == WATCHED and not self._is_asked and (what := self._first_watched.changed()) is not None:
            self._found.refuse(Kept.TRAINING_CHANGES(what=what))
        return made

    def is_due(self) -> bool:
        """Whether the batch that has come from a worker now is to be fetched by the loop as well."""
        self._delivered += 1
        return is_due(self._delivered)

    def compare(self, make: Callable[[], Any], other: Any, number: int) -> Any:
        """The loop's own batch; where a worker's is another one, workers are refused."""
        own = self.watch(make)
        if self._is_asked:
            self.undo.undo()
        what = difference(own, other)
        if what is None:
            self.compared += 1
        else:
            self._found.refuse(Kept.SAMPLES_DIFFER(batch=number, what=what))
        return own

    def begin(self) -> None:
        self._parts = Parts(self._named)
        self._seen, self._whole = self._parts.noted(), self._parts.noted(whole=True)

    def changed(self) -> str | None:
        """What the training has changed since workers began."""
        return None if self._seen is None else self._seen.changed()

    def has_stayed(self) -> bool:
        """Whether all is as it was when workers began, so that they can be kept for another epoch."""
        return (
            self._seen is not None
            and self._whole is not None
            and self._whole.is_whole
            and not (self._seen.changed() or self._whole.changed())
        )


class DrawnAhead:
    """Whether a sampler of the script's own draws from global generators between two batches: then nothing is drawn ahead."""

    def __init__(self, refuse: Callable[[Finding], None]) -> None:
        self._refuse, self._left = refuse, WATCHED

    def next(self, draw: Callable[[], Any]) -> Any:
        """An index batch; not the first one, with which a whole order may be drawn."""
        if not self._left:
            return draw()
        self._left -= 1
        before = _global_states()
        drawn = draw()
        if self._left < WATCHED - 1 and _global_states() != before:
            self._refuse(Kept.SAMPLER_DRAWS())
        return drawn


def _global_states() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


@dataclass(eq=False)
class LoaderState:
    """Of one loader, as long as its parts and its settings are the same."""

    found: Found
    sent: Sent
    samplers: dict[str, Any]
    context: Any
    timeout_s: float
    pins: bool
    keeps: bool
    """Whether workers are kept whatever they did: `persistent_workers`."""
    proof: Proof | None = None
    seeds: Seeds | None = None
    workers: Workers | None = None
    """Those that no iterator has now."""
    fetched: int = 0
    training_changes: int = 0
    current: weakref.ref[Any] | None = field(default=None, repr=False)
    """The iterator that was begun last, whose batches are noted."""

    def known(self) -> Proof:
        """What is known of the data; the first call looks at them."""
        if self.proof is None:
            self.proof = Proof({**self.sent.named(), **self.samplers}, self.found)
        return self.proof

    def take_workers(self, undo: Any) -> Workers:
        """Those that are there, fit for another epoch, or new ones."""
        workers, self.workers = self.workers, None
        if workers is not None and not self.keeps:
            is_fit = self.sent.init_fn is None and workers.are_like_new and self.known().has_stayed()
            if not is_fit:
                workers.close()
                workers = None
        if workers is None or not len(workers):
            self.known().begin()
            workers = Workers(self.sent, self.context, asked=self.found.asked.num_workers, undo=undo, pins=self.pins)
        return workers

    def give_workers(self, workers: Workers) -> None:
        workers.rest()
        self.found.lost, workers.lost = self.found.lost + workers.lost, 0
        if self.workers is None:
            self.workers = workers
        else:
            workers.close()
