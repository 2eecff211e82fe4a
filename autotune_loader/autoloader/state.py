"""What all iterators of one loader share: its log, its tuner, what is known of its data, and the workers between two epochs."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

from autotune_loader.autoloader.log import Log
from autotune_loader.autoloader.proof import Proof
from autotune_loader.autoloader.seeds import Seeds
from autotune_loader.autoloader.tuner import Tuner
from autotune_loader.autoloader.work import Sent
from autotune_loader.autoloader.workers import Workers
from autotune_loader.diagnosis import Kept
from autotune_loader.results.record import Finding
from autotune_loader.values.config import LoaderConfig

MOST_TRAINING_CHANGES = 3
"""Epochs in whose midst the training changes the data; then workers are given up for good."""

log = logging.getLogger("autotune_loader.autoloader")


@dataclass(eq=False)
class LoaderState:
    """Of one loader, as long as its parts and its settings are the same."""

    sent: Sent
    samplers: dict[str, Any]
    asked: LoaderConfig
    context: Any
    """Of `multiprocessing`, for workers."""
    timeout_s: float
    pins: bool
    keeps: bool
    """Whether workers are kept whatever they did: `persistent_workers`."""
    log: Log
    kept: Finding | None = None
    """Why the number of workers stays; None where it may be changed."""
    tuner: Tuner | None = None
    proof: Proof | None = None
    seeds: Seeds | None = None
    workers: Workers | None = None
    """Those that no iterator has now."""
    fetched: int = 0
    """Batches that the loop has fetched."""
    lost: int = 0
    """Workers that were lost and replaced."""
    training_changes: int = 0
    current: weakref.ref[Any] | None = field(default=None, repr=False)
    """The iterator that was begun last, whose batches are noted."""

    @property
    def is_asked(self) -> bool:
        """Whether the script asked for workers."""
        return self.asked.num_workers > 0

    @property
    def config(self) -> LoaderConfig:
        """What is wanted now."""
        return self.asked if self.tuner is None else self.tuner.wanted

    def known(self) -> Proof:
        """What is known of the data; the first call looks at them."""
        if self.proof is None:
            self.proof = Proof({**self.sent.named(), **self.samplers}, is_asked=self.is_asked)
        return self.proof

    def refuse(self, why: Finding) -> None:
        """Only what was asked for may run from now on."""
        if self.kept is None:
            self.kept = why
            log.info("the number of workers stays: %s", why.sentence)
        self.known().refuse(why)
        if self.tuner is not None:
            self.tuner.refuse()

    def training_changed(self, what: str) -> None:
        """The training has changed in mid-epoch what workers have copies of."""
        self.training_changes += 1
        if self.training_changes >= MOST_TRAINING_CHANGES:
            self.refuse(Kept.TRAINING_CHANGES(what=what))

    def give_up(self, error: BaseException) -> None:
        """Ours went wrong: training goes on, untuned."""
        log.warning("AutoLoader no longer tunes this loader: %s: %s", type(error).__name__, error, exc_info=True)
        if self.tuner is not None:
            self.tuner.freeze()
            self.tuner.wanted = self.asked

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
            workers = Workers(self.sent, self.context, asked=self.asked.num_workers, undo=undo, pins=self.pins)
        return workers

    def give_workers(self, workers: Workers) -> None:
        """An iterator needs them no longer."""
        workers.rest()
        self.lost, workers.lost = self.lost + workers.lost, 0
        if self.workers is None:
            self.workers = workers
        else:
            workers.close()
