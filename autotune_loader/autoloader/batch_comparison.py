"""Whether workers' batches may be used: their first ones, and then ever fewer, are fetched by the loop as well.

    first fetch   what it makes ready (a file that is opened) is noted, so that workers begin without it
    4 fetches     watched: what they change or write, only the training process may
    workers       a batch comes ── the loop fetches it, too, under the same seed ── the same? ── the loop's own is delivered

Batches 1 to 8 of workers are compared, then 16, 32, 64 ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotune_loader.autoloader.difference import difference
from autotune_loader.autoloader.order import Item, Order
from autotune_loader.autoloader.parts import Change, Noted, Parts, undo
from autotune_loader.autoloader.seeds import states
from autotune_loader.autoloader.tuner import GATE_BATCHES
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.machine.elsewhere import changed_files

FIRST, WATCHED = 8, 4
"""Batches of workers that are compared at first; fetches of the loop that are watched before workers may start."""
UNWATCHED = GATE_BATCHES // 2 - WATCHED
"""Batches of the loop before some are watched: short loops are left alone."""


class BatchComparison:
    """What is known of one loader's data.

    Args:
        named: dataset, collate function and samplers, by the names that people know them by.
        refuse: told what speaks against workers.
        is_asked: whether the script asked for workers: then fetches of the loop leave nothing behind.

    Attributes:
        ready: what the loop's first fetch has made ready, which workers begin without.
        compared: batches of workers that were the loop's own.
    """

    def __init__(self, named: dict[str, Any], refuse: Callable[[Finding], None], *, is_asked: bool) -> None:
        self._named, self._refuse, self._is_asked = named, refuse, is_asked
        self._parts, self._first, self.ready = Parts(named), list[Noted](), list[Change]()
        self.fetched = self.watched = self.compared = self.delivered = self._drawn = 0

    @property
    def allows_another(self) -> bool:
        """Whether another number of workers than the one asked for may run: or be started, to be compared."""
        return self.compared >= FIRST if self._is_asked else self.watched >= WATCHED

    def own(self, make: Callable[[], Any]) -> Any:
        """A fetch of the loop; the first one and some before workers start are watched."""
        self.fetched += 1
        if self.fetched == 1:
            before = Noted(self._parts)
            try:
                return make()
            finally:
                self._parts, self.ready = Parts(self._named), list(before.changes())
        return make() if self.fetched <= UNWATCHED or self.watched >= WATCHED else self._watch(make)

    def _watch(self, make: Callable[[], Any]) -> Any:
        before, self.watched = Noted(self._parts), self.watched + 1
        self._first = self._first or [before]
        with changed_files() as files:
            try:
                made = make()
            finally:
                if (what := before.changed()) is not None:
                    self._refuse(Kept.DATASET_CHANGES(what=what))
                if self._is_asked:
                    undo(list(before.changes()))
        if files:
            self._refuse(Kept.WRITES_FILES(path=files[0]))
        if self.watched == WATCHED and not self._is_asked and (what := self._first[0].changed()) is not None:
            self._refuse(Kept.TRAINING_CHANGES(what=what))
        return made

    def is_due(self) -> bool:
        """Whether the batch that has come from a worker now is to be fetched by the loop as well."""
        self.delivered += 1
        return self.delivered <= FIRST or self.delivered & (self.delivered - 1) == 0

    def compare(self, make: Callable[[], Any], other: Any, number: int) -> Any:
        """The loop's own batch and what is known of its fetch; where a worker's is another one, workers are refused."""
        own = self._watch(make)
        try:
            what = difference(own[0], other)
        except Exception as error:  # of somebody's own class of batches
            what = f"batch, which cannot be compared: {error}"
        if what is None:
            self.compared += 1
        else:
            self._refuse(Kept.SAMPLES_DIFFER(batch=number, what=what))
        return own

    def draw(self, order: Order) -> Item:
        """The next index batch; nothing may be drawn ahead where a sampler draws from global generators between two of them."""
        if order.is_torchs or self._drawn >= WATCHED:
            return next(order)
        before, torchs, self._drawn = states(), torch.get_rng_state(), self._drawn + 1
        drawn = next(order)
        if self._drawn > 1 and not (states() == before and torch.equal(torch.get_rng_state(), torchs)):
            self._refuse(Kept.SAMPLER_DRAWS())
        return drawn
