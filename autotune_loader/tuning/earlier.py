"""An earlier result of the same workload on the same machine: found, checked, used if it holds, kept for the next call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_loader.decision.space import Space
from autotune_loader.probe.protocol import Probe
from autotune_loader.results import cache
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.assemble import assemble_reused
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.recheck import check
from autotune_loader.tuning.state import RunContext
from autotune_loader.tuning.study import OptunaStudy
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EarlierResult:
    """What the cache knows of a call, and the place for what the call finds."""

    context: RunContext
    options: TuneOptions
    key: str
    """Of this call in the cache."""
    entry: cache.Entry | None
    """None where nothing was kept, or it is not to be used."""
    objections: tuple[str, ...] = field(default=())
    """Why the earlier result was not used, in a sentence."""

    @classmethod
    def find(cls, context: RunContext, options: TuneOptions, *, ranks: int) -> EarlierResult:
        """The earlier result of this call, if there is one."""
        limits, step = options.limits(), context.warmup.step
        key = cache.result_key(context.workload, context.fingerprint, limits, step=step, ranks=ranks)
        # A study that is kept on purpose is to be gone on with, not passed over.
        is_wanted = options.reuse and options.storage is None
        entry = cache.find(key) if is_wanted else None
        return cls(context=context, options=options, key=key, entry=entry)

    @property
    def suggestions(self) -> tuple[LoaderConfig, ...]:
        """Configurations to try early: what was found before, and what an AutoLoader has written where the result will be."""
        found = () if self.entry is None else (self.entry.result.best,)
        output = self.options.output
        if not self.options.reuse or output is None or not Path(output).is_file():
            return found
        try:
            written = TuningResult.load(output)
        except TunerError as error:
            log.info("%s is not begun with: %s", output, error)
            return found
        return (*found, replace(written.best, persistent_workers=False)) if written.origin == "live" else found

    def check(self, probe: Probe, started: float, announce: Callable[[str], None]) -> TuningResult | None:
        """The earlier result, after a paired check; None where there is none, or none that holds."""
        entry, options, context = self.entry, self.options, self.context
        if entry is None:
            return None
        if not entry.is_enough_for(options.budget_s, options.max_trials):
            log.info("the earlier result of %s had less time or fewer trials; tuning anew", entry.note.tuned_at)
            return None
        baseline = context.workload.own_config or LoaderConfig()
        announce(f"checking the result of {entry.note.tuned_at}: {entry.result.best}")
        seen = check(probe, entry, baseline, context.space, options.tolerance)
        if seen.objection:
            long = f" ({seen.why_long})" if seen.why_long else ""
            text = f"the result of {entry.note.tuned_at} ({entry.result.best}) was not reused: {seen.objection}{long}"
            log.warning("%s; tuning anew", text)
            self.objections = (text,)
            return None
        study = study_of(entry.result, context.space, options)
        return assemble_reused(entry, seen, context, baseline, time.monotonic() - started, study)

    def keep(self, result: TuningResult, *, cut_short: bool) -> None:
        """Keep the result of a search for the next call, without what was said of this one alone, and for AutoLoaders."""
        lasting = tuple(warning for warning in result.warnings if warning not in self.objections)
        cache.keep(
            self.key,
            replace(result, warnings=lasting),
            budget_s=self.options.budget_s,
            max_trials=self.options.max_trials,
            cut_short=cut_short,
        )
        if result.status == "complete":
            cache.remember(cache.job_key(self.context.workload.data, self.context.fingerprint), result.best)


def study_of(result: TuningResult, space: Space, settings: TuneOptions) -> optuna.Study:
    """The Optuna study of an earlier result's trials, in memory."""
    study = OptunaStudy(
        storage=None,
        name=settings.study_name or "autotune-reused",
        space=space,
        search=settings.search,
        seed=settings.seed,
    )
    for trial in result.trials:
        study.tell(study.ask(trial.config), trial)
    return study.study
