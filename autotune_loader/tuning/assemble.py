"""From the state of a search to the `TuningResult`, and who is told of it while the search runs.

Whose figures a result holds is decided here; what they mean is said in `report`.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, replace
from typing import Any

from autotune_loader.decision.rounds import averaged
from autotune_loader.decision.stopping import StopReason
from autotune_loader.pipeline.stages import pooled, stage_times
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.first_batches import SLOW_FETCH_S
from autotune_loader.report import summary
from autotune_loader.report.assembly import judged
from autotune_loader.report.progress import Progress
from autotune_loader.report.semantics import consequences
from autotune_loader.report.standings import measurement_of, rate_of
from autotune_loader.results.loader_file import (
    BatchSizeChoice,
    Finals,
    Measured,
    RateUnit,
    Reused,
    Spent,
    Status,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.earlier import Check
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval, mean_share
from autotune_loader.values.trial import Trial

log = logging.getLogger(__name__)

NOT_WRITTEN = "could not be written"
"""What a warning says of a file that was asked for."""


def assemble(state: SearchState, seconds: float, *, final: bool) -> TuningResult:
    """The result of a search after so many wall seconds; one that is not `final`, or was interrupted, is "partial"."""
    context, finals, fastest = state.run, _finals(state), state.fastest()
    data, warmup = context.workload.data, context.warmup
    best = fastest.config if fastest is not None else LoaderConfig()
    best = state.finals.winner if state.finals is not None else best
    status: Status = "complete" if finals.undecided is None else "undecided"
    if not final or state.interrupted:
        status = "partial"
    elif fastest is None:
        status = "fallback"
    epoch_batches = data.batches_per_epoch(best.batch_size or warmup.burst_batch_size)
    found = TuningResult(
        best=best,
        status=status,
        baseline=state.baseline,
        trials=tuple(state.trials),
        batch_size=BatchSizeChoice(value=best.batch_size or data.batch_size, tuned=best.batch_size is not None),
        measured=_measured(best, state, finals),
        finals=finals,
        spent=Spent(seconds=round(seconds, 3), bursts=state.bursts),
        fingerprint=context.fingerprint,
        twin=replace(state.context, epoch_batches=epoch_batches),
        stage_times=stage_times(pooled(trial.measurement.stages for trial in state.trials if trial.measurement)),
        warnings=_warnings(best, state, finals),
        tolerance=context.tolerance,
        study=state.study,
        parts=loader_parts(context.workload),
    )
    measured = found.measured
    before = [
        summary.INTERRUPTED if status == "partial" else "",
        summary.undecided_sentence(finals.undecided) if status == "undecided" else "",
        summary.use_sentence(best, measured.samples_per_s, measured.rate_unit),
        summary.speedup_sentence(best, state.baseline, measured.speedup, is_decided=status == "complete"),
    ]
    after = [
        f"Step: {warmup.step}. {summary.why_it_ended(state.stop_reason)}",
        summary.SHORT_EPOCHS if state.finals is not None and state.whole_epochs else "",
    ]
    is_fallback = status == "fallback"
    return judged(
        found,
        before=() if is_fallback else before,
        after=summary.failure_kinds(found.trials) if is_fallback else after,
        nothing=summary.FALLBACK if is_fallback else summary.NOTHING_MEASURED,
        on_accelerator=not context.workload.on_cpu,
        has_batched_fetch=data.has_batched_fetch,
        space=context.space,
    )


def assemble_reused(seen: Check, context: RunContext, seconds: float) -> TuningResult:
    """An earlier result that passed a check as the answer of now: its evidence, what the check saw, and what was said of this
    call, which took so many seconds. The speed-up is over the baseline of now.
    """
    earlier, baseline, rate = seen.earlier, context.baseline, seen.rate(seen.earlier.best)
    assert rate is not None
    assert earlier.tuned_at is not None
    measured = earlier.measured
    if baseline != earlier.baseline:
        now = seen.rate(baseline) if seen.partner == baseline else rate
        unsure = None if now is None else Interval(value=now, low=-math.inf, high=math.inf, count=len(seen.rounds))
        speedup = seen.speedup if seen.partner == baseline else None
        measured = replace(measured, speedup=speedup, baseline_samples_per_s=unsure)
    reused = Reused(
        tuned_at=earlier.tuned_at,
        samples_per_s=rate,
        speedup=None if seen.speedup is None else seen.speedup.value,
        rounds=len(seen.rounds),
        seconds=earlier.spent.seconds,
    )
    unit = measured.rate_unit
    sentences = summary.told(
        summary.reused_sentence(reused, seen.partner, unit, seen.why_long),
        summary.use_sentence(earlier.best, measured.samples_per_s, unit),
        summary.speedup_sentence(earlier.best, baseline, measured.speedup),
        earlier.verdict.sentence,
        f"Step: {context.warmup.step}.",
    )
    return replace(
        earlier,
        baseline=baseline,
        measured=measured,
        summary=sentences,
        warnings=(*summary.bad_samples(context.warmup.bad_samples), *context.notes, *earlier.warnings),
        spent=Spent(seconds=round(seconds, 3), bursts=seen.bursts),
        fingerprint=context.fingerprint,
        reused=reused,
        parts=loader_parts(context.workload),
    )


def _measured(best: LoaderConfig, state: SearchState, finals: Finals) -> Measured:
    """Every figure from where the table has it, too."""
    unit: RateUnit = "batches/s" if state.run.warmup.counts_batches else "samples/s"
    before = rate_of(state.baseline, finals, state.trials, is_best=state.baseline == best)
    measurement = measurement_of(best, finals, state.trials)
    if measurement is None:
        return Measured(rate_unit=unit, baseline_samples_per_s=before)
    bursts = state.finals.bursts.get(best, ()) if state.finals is not None else ()
    return Measured(
        rate_unit=unit,
        samples_per_s=rate_of(best, finals, state.trials, is_best=True),
        baseline_samples_per_s=before,
        speedup=None if state.finals is None else state.finals.speedup,
        ceiling_samples_per_s=state.ceiling_of(best),
        wait_share=measurement.wait_share,
        wait_interval=mean_share([each.wait_share for each in bursts]),
        first_batch_s=measurement.first_batch_s,
        cpu_share=measurement.cpu_share,
        gpu_busy_share=measurement.gpu.busy_share,
        gpu_util=measurement.gpu.util,
        gpu_memory_bytes=measurement.gpu.memory_bytes,
        **({} if measurement.memory is None else asdict(measurement.memory)),
    )


def _finals(state: SearchState) -> Finals:
    outcome, tolerance = state.finals, state.run.tolerance
    tried = {trial.config.key() for trial in state.trials if trial.measurement is not None}
    was_short = len(tried) == 1 and state.stop_reason is StopReason.OUT_OF_BUDGET
    untried = summary.NOTHING_COMPARED if was_short else None
    if outcome is None:
        return Finals(undecided=summary.why_undecided(None, tolerance) if len(tried) > 1 else untried)
    return Finals(
        configs=outcome.configs,
        rounds=tuple(tuple(each.rates.get(config) for config in outcome.configs) for each in outcome.rounds),
        whole_epochs=state.whole_epochs,
        foreign_cpu_share=tuple(each.foreign_cpu_share for each in outcome.rounds),
        measurements=tuple(
            averaged(outcome.bursts[config]) if config in outcome.bursts else None for config in outcome.configs
        ),
        as_fast=outcome.as_fast,
        undecided=summary.why_undecided(outcome, tolerance) or untried,
    )


def _warnings(best: LoaderConfig, state: SearchState, finals: Finals) -> tuple[str, ...]:
    context = state.run
    measured = [trial.measurement for trial in state.trials]
    measured += [state.finals.measurement] if state.finals is not None else []
    bad = [*context.warmup.bad_samples, *(bad for each in measured if each is not None for bad in each.bad_samples)]
    notes = [*summary.bad_samples(bad), *consequences(best, context.workload.data), *context.notes]
    if state.finals is not None:
        # That the rounds were disturbed is said where the choice is called undecided.
        notes += state.finals.failures if finals.undecided is not None else state.finals.notes
    elif context.warmup.first_fetch_s > SLOW_FETCH_S:
        notes.append(summary.slow_batches(context.warmup.first_fetch_s))
    return tuple(dict.fromkeys([*notes, *summary.failed_trials(state.trials)]))


def loader_parts(workload: Workload) -> dict[str, Any]:
    """What a loader made from the result takes over from the tuned one."""
    data = workload.data
    parts = {"collate_fn": data.collate_fn, "worker_init_fn": data.worker_init_fn, "generator": data.generator}
    if data.has_own_order:
        order = "sampler" if data.batch_sampler is None else "batch_sampler"
        parts |= {order: getattr(data, order), "dataset": data.dataset}
    return {name: value for name, value in {**parts, "drop_last": data.drop_last or None}.items() if value is not None}


class FileAndProgress:
    """Rewrites `loader.json` after every trial and draws a line for it."""

    def __init__(self, output: str | None, progress: Progress, started: float) -> None:
        self._output, self._started, self._progress = output, started, progress
        self.finals_round = progress.finals_round

    def trial(self, state: SearchState, trial: Trial, seconds_left: float) -> None:
        best = state.fastest()
        self._progress.trial(trial, best, seconds_left)
        if self._output is not None and best is not None:
            saved(assemble(state, time.monotonic() - self._started, final=False), self._output)


def saved(result: TuningResult, output: str | None) -> TuningResult:
    """The result, written where that was asked for. A disk that is full by now costs a warning, not the result."""
    if output is None:
        return result
    try:
        result.save(output)
    except OSError as error:
        text = f"{output} {NOT_WRITTEN} ({error.strerror}); result.save() elsewhere keeps the result"
        log.warning(text)
        return replace(result, warnings=(*result.warnings, text))
    return result
