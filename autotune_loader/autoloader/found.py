"""What is known of a loader, without the loader: it holds no data, and lives on when that is gone."""

from __future__ import annotations

from dataclasses import dataclass

from autotune_loader.autoloader.log import Log
from autotune_loader.autoloader.tuner import GATE_BATCHES, WAITING, Tuner, measured
from autotune_loader.diagnosis import Finding, Kept, judged
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.site import Site
from autotune_loader.results.result import TuningResult
from autotune_loader.values import Interval, LoaderConfig, Measurement, Trial, averaged


@dataclass(eq=False, kw_only=True)
class Found:
    site: Site
    log: Log
    tuner: Tuner
    has_batched_fetch: bool
    lost: int = 0
    """Workers that were lost and replaced."""

    @property
    def config(self) -> LoaderConfig:
        """The configuration that is wanted now."""
        return self.tuner.wanted

    @property
    def best(self) -> LoaderConfig:
        """The best configuration that is known."""
        return self.tuner.best

    @property
    def gain(self) -> Interval | None:
        """How many times as fast as what was asked for, where pairs have shown that."""
        return self.tuner.gain

    @property
    def kept(self) -> Finding | None:
        """Why the number of workers is what was asked for; None where it is another."""
        tuner = self.tuner
        if tuner.refused is not None or tuner.best != tuner.asked:
            return tuner.refused
        if len({config for config, _ in tuner.measured}) > 1:
            return Kept.NOT_FASTER()
        if tuner.waiting is None or tuner.waiting >= WAITING:
            return Kept.TOO_SHORT()
        return Kept.NOT_WAITING(wait=tuner.waiting)

    @property
    def result(self) -> TuningResult:
        """As `tune()` returns it: what was measured of a configuration, all in all, is its trial."""
        tuner, trials = self.tuner, self._trials()
        own = next((trial.measurement for trial in trials if trial.config == self.best), None)
        found = TuningResult(
            best=self.best,
            status="complete" if tuner.is_settled else "partial",
            found_by="autoloader",
            baseline=tuner.asked,
            batch_size=self.site.batch_size,
            rate=None if own is None else own.samples_per_s,
            speedup=self.gain,
            wait_share=None if own is None else own.wait_share,
            warnings=() if self.kept is None else (self.kept,),
            trials=trials,
            seconds=round(self.log.totals.active_s, 3),
            machine=inspect_machine().fingerprint(dataset=self.site.dataset),
        )
        return judged(found, has_batched_fetch=self.has_batched_fetch)

    def _trials(self) -> tuple[Trial, ...]:
        known, by_config = self.tuner.measured, dict[LoaderConfig, list[Measurement]]()
        if not known and len(self.log.rows) >= GATE_BATCHES and (seen := measured(self.log.rows)) is not None:
            known = [(self.tuner.asked, seen)]
        for config, seen in known:
            by_config.setdefault(config, []).append(seen)
        return tuple(
            Trial(number=number, config=config, measurement=averaged(all_), seconds=sum(each.window_s for each in all_))
            for number, (config, all_) in enumerate(by_config.items())
        )
