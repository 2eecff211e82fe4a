"""What is known of a loader, without the loader: it holds no data, and lives on when that is gone."""

from __future__ import annotations

from autotune_loader.autoloader.log import Log, continuous
from autotune_loader.autoloader.tuner import GATE_BATCHES, WAITING, Tuner
from autotune_loader.diagnosis import Kept, judged
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.limits import usable_cores
from autotune_loader.pipeline.site import Site
from autotune_loader.pipeline.throughput import summarise
from autotune_loader.results.record import Finding, Job
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from autotune_loader.values.trial import Trial


class Found:
    """What one loader has shown so far.

    Args:
        site: of the loader.
        asked: what it was asked for.
        log: of its batches.
        has_batched_fetch: whether its dataset can fetch batches.
    """

    def __init__(self, site: Site, asked: LoaderConfig, log: Log, *, has_batched_fetch: bool) -> None:
        self.site, self.asked, self.log, self.lost = site, asked, log, 0
        self.refused: Finding | None = None
        """Why another number of workers is not tried; None where it is, or may be."""
        self.tuner: Tuner | None = None
        self._has_batched_fetch = has_batched_fetch

    @property
    def config(self) -> LoaderConfig:
        """What is wanted now."""
        return self.asked if self.tuner is None else self.tuner.wanted

    @property
    def best(self) -> LoaderConfig:
        """The best that is known."""
        return self.asked if self.tuner is None else self.tuner.best

    @property
    def gain(self) -> Interval | None:
        """How many times as fast as what was asked for, where pairs have shown that."""
        return None if self.tuner is None else self.tuner.gain

    @property
    def kept(self) -> Finding | None:
        """Why the number of workers is what was asked for; None where it is another."""
        if self.refused is not None or self.best != self.asked:
            return self.refused
        tuner = self.tuner
        if tuner is not None and len({block.config for block in tuner.blocks}) > 1:
            return Kept.NOT_FASTER()
        if tuner is None or tuner.waiting is None or tuner.waiting >= WAITING:
            return Kept.TOO_SHORT()
        return Kept.NOT_WAITING(wait=tuner.waiting)

    @property
    def result(self) -> TuningResult:
        """As `tune()` returns it: the stretches of training that one configuration has made are its trials."""
        trials = self._trials()
        own = [trial.measurement for trial in trials if trial.config == self.best and trial.measurement is not None]
        found = TuningResult(
            best=self.best,
            status="complete" if self.tuner is not None and self.tuner.is_settled else "partial",
            found_by="autoloader",
            baseline=self.asked,
            batch_size=self.site.batch_size,
            rate=own[-1].samples_per_s if own else None,
            speedup=self.gain,
            wait_share=own[-1].wait_share if own else None,
            warnings=() if self.kept is None else (self.kept,),
            trials=tuple(trials),
            seconds=round(self.log.totals.active_s, 3),
            job=Job(usable_cores=usable_cores().usable),
            machine=inspect_machine().fingerprint(dataset=self.site.dataset),
        )
        return judged(found, has_batched_fetch=self._has_batched_fetch)

    def _trials(self) -> list[Trial]:
        trials: list[Trial] = []
        if not self.log.changes:
            return trials
        ends = [change.batch for change in self.log.changes[1:]] + [self.log.end]
        for change, end in zip(self.log.changes, ends, strict=True):
            rows = self.log.since(change.batch)[: max(0, end - max(change.batch, self.log.forgotten))]
            made = [row for row in rows if (row.worker != MAIN_PROCESS) == (change.config.num_workers > 0)]
            if len(made) >= GATE_BATCHES:
                trials.append(self._trial(len(trials), change.config, made))
        return trials

    def _trial(self, number: int, config: LoaderConfig, rows: list[BatchTrace]) -> Trial:
        measured = summarise(continuous(rows), workers=config.num_workers, started=rows[0].requested)
        return Trial(number=number, config=config, measurement=measured, seconds=measured.window_s)
