"""What is known of a loader, without the loader: it holds no data, and lives on when that is gone."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from autotune_loader.autoloader.log import Log
from autotune_loader.autoloader.tuner import GATE_BATCHES, WAITING, Block, Tuner, block_of
from autotune_loader.diagnosis import Kept, judged
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.site import Site
from autotune_loader.results.record import Finding
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement, averaged
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial

log = logging.getLogger("autotune_loader.autoloader")


@dataclass(eq=False, kw_only=True)
class Found:
    site: Site
    asked: LoaderConfig
    log: Log
    has_batched_fetch: bool
    refused: Finding | None = None
    """Why another number of workers is not tried; None where it is, or may be."""
    tuner: Tuner | None = None
    lost: int = 0
    """Workers that were lost and replaced."""

    @property
    def is_asked(self) -> bool:
        """Whether the script asked for workers."""
        return self.asked.num_workers > 0

    def refuse(self, why: Finding) -> None:
        """Only what was asked for may run from now on, for good; the first reason counts."""
        if self.refused is None:
            self.refused = why
            log.info("the number of workers stays: %s", why.sentence)
            if self.tuner is not None:
                self.tuner.refuse()

    @property
    def config(self) -> LoaderConfig:
        return self.asked if self.tuner is None else self.tuner.wanted

    @property
    def best(self) -> LoaderConfig:
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
        """As `tune()` returns it: what was measured of a configuration, all in all, is its trial."""
        trials = self._trials()
        own = next((trial.measurement for trial in trials if trial.config == self.best), None)
        found = TuningResult(
            best=self.best,
            status="complete" if self.tuner is not None and self.tuner.is_settled else "partial",
            found_by="autoloader",
            baseline=self.asked,
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
        blocks = [] if self.tuner is None else self.tuner.blocks
        if not blocks and len(self.log.rows) >= GATE_BATCHES:
            blocks = [each for each in [block_of(self.asked, self.log.rows)] if each is not None]
        by_config: dict[LoaderConfig, list[Measurement]] = {}
        for block in blocks:
            by_config.setdefault(block.config, []).append(_measured(block))
        return tuple(
            Trial(
                number=number,
                config=config,
                measurement=averaged(measured),
                seconds=sum(each.window_s for each in measured),
            )
            for number, (config, measured) in enumerate(by_config.items())
        )


def _measured(block: Block) -> Measurement:
    samples = round(block.samples_per_s * block.seconds)
    return Measurement(
        samples_per_s=Interval(value=block.samples_per_s, low=-math.inf, high=math.inf, count=block.batches),
        samples=samples,
        window_s=block.seconds,
        batch_size=samples / block.batches,
        first_batch_s=block.fetch_s + block.receive_s,
        wait_share=min(max(0.0, block.waiting), 1.0),
        service_s=block.fetch_s,
        service_cpu_s=block.fetch_cpu_s,
        receive_s=block.receive_s,
        step_s=block.step_s,
    )
