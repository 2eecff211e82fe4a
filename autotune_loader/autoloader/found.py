"""What is known of a loader, without the loader: it holds no data, and lives on when that is gone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from autotune_loader.autoloader.meter import measured
from autotune_loader.autoloader.tuner import GATE_BATCHES, WAITING, Tuner
from autotune_loader.diagnosis import Advice, Finding, Kept, judged
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.loop_log import Log, Site
from autotune_loader.report.result import TuningResult
from autotune_loader.values import Trial, averaged


@dataclass(eq=False, kw_only=True)
class Found:
    site: Site
    log: Log
    tuner: Tuner
    has_batched_fetch: bool

    config = property(attrgetter("tuner.wanted"), doc="The configuration that is wanted now.")
    best = property(attrgetter("tuner.best"), doc="The best configuration that is known.")
    gain = property(attrgetter("tuner.gain"), doc="How many times as fast as asked, where pairs show that.")

    @property
    def has_tried(self) -> bool:
        """Whether some batches were made by another number of workers than was asked for."""
        return self.tuner.is_trying or len(self.tuner.measured) > 1

    @property
    def kept(self) -> Finding | None:
        """Why the number of workers is what was asked for; None where it is another."""
        tuner = self.tuner
        if tuner.refused is not None or tuner.best != tuner.asked:
            return tuner.refused
        if tuner.is_trying:
            return Kept.NOT_SETTLED()
        if len(tuner.measured) > 1:
            return Kept.NOT_FASTER()
        seen = tuner.measured.get(tuner.asked)
        if seen is None or seen[-1].wait_share >= WAITING:
            return Kept.TOO_SHORT()
        return Kept.NOT_WAITING(wait=seen[-1].wait_share)

    @property
    def result(self) -> TuningResult:
        """As `tune()` returns it: what was measured of a configuration, all in all, is its trial."""
        tuner, trials = self.tuner, self._trials()
        own = next((trial.measurement for trial in trials if trial.config == tuner.best), None)
        found = TuningResult(
            best=tuner.best,
            status="partial" if tuner.is_trying or tuner.best not in tuner.measured else "complete",
            found_by="autoloader",
            baseline=tuner.asked,
            batch_size=self.site.batch_size,
            rate=None if own is None else own.samples_per_s,
            speedup=tuner.gain,
            wait_share=None if own is None else own.wait_share,
            warnings=() if self.kept is None else (self.kept,),
            trials=trials,
            seconds=round(self.log.totals.active_s, 3),
            machine=inspect_machine().fingerprint(dataset=self.site.dataset),
        )
        found = judged(found, has_batched_fetch=self.has_batched_fetch)
        if not tuner.none_would_be_faster:
            return found
        return replace(found, advice=(Advice.WITHOUT_WORKERS(), *found.advice))

    def _trials(self) -> tuple[Trial, ...]:
        known = self.tuner.measured
        if not known and len(self.log.rows) >= GATE_BATCHES and (seen := measured(self.log.rows)) is not None:
            known = {self.tuner.asked: [seen]}
        return tuple(
            Trial(number=number, config=config, measurement=averaged(all_), seconds=sum(each.window_s for each in all_))
            for number, (config, all_) in enumerate(known.items())
        )
