"""From the state of a search to the `TuningResult`, and who is told of it while the search runs.

Whose figures a result holds is decided here; what they mean is said in `diagnosis`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from autotune_loader.decision.race import MIN_ROUNDS
from autotune_loader.decision.stopping import StopReason
from autotune_loader.diagnosis import Caution, Ended, Undecided, judged
from autotune_loader.pipeline.stages import pooled, stage_times
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.report.progress import Progress
from autotune_loader.results.record import Finding, Job, Status
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.state import SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT, MAX_DISCARDED_SHARE, Interval, mean_interval
from autotune_loader.values.trial import Trial

log = logging.getLogger(__name__)

_ENDED = {
    StopReason.CEILING: Ended.CEILING,
    StopReason.CHOICE_SAFE: Ended.SAFE,
    StopReason.OUT_OF_BUDGET: Ended.BUDGET,
    StopReason.OUT_OF_TRIALS: Ended.TRIALS,
    StopReason.SAMPLER_REPEATS: Ended.SAMPLER,
    StopReason.INTERRUPTED: Ended.INTERRUPTED,
}


def assemble(state: SearchState, seconds: float, *, final: bool) -> TuningResult:
    """The result of a search after so many wall seconds; one that is not `final`, or was interrupted, is "partial"."""
    context, fastest = state.run, state.fastest()
    data, warmup, outcome = context.workload.data, context.warmup, state.finals
    best = outcome.winner if outcome is not None else fastest.config if fastest is not None else LoaderConfig()
    undecided = _undecided(state)
    status: Status = "complete" if undecided is None else "undecided"
    if not final or state.interrupted:
        status = "partial"
    elif fastest is None:
        status = "fallback"
    found = TuningResult(
        best=best,
        status=status,
        tuned_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        baseline=state.baseline,
        batch_size=best.batch_size or data.batch_size,
        shuffle=shuffles(data),
        drop_last=data.drop_last,
        rate_unit="batches/s" if warmup.counts_batches else "samples/s",
        as_fast=() if outcome is None else outcome.as_fast,
        undecided=undecided if status == "undecided" else None,
        ended=Ended.ASKED() if state.stop_reason is None else _ENDED[state.stop_reason](),
        step=warmup.step,
        stages=stage_times(pooled(trial.measurement.stages for trial in state.trials if trial.measurement)),
        warnings=tuple(dict.fromkeys(_warnings(best, state))),
        tolerance=context.tolerance,
        seconds=round(seconds, 3),
        job=_job(state, data.batches_per_epoch(best.batch_size)),
        machine=context.fingerprint,
        trials=(*state.trials, *_round_trials(state)),
        study=state.study,
        parts=loader_parts(context.workload),
    )
    return judged(_with_figures(found, state), has_batched_fetch=data.has_batched_fetch)


def _with_figures(found: TuningResult, state: SearchState) -> TuningResult:
    """The result with what was measured of the best and of the baseline."""
    measured, outcome = found.measurement_of(found.best), state.finals
    found = replace(found, baseline_rate=_rate_of(found, found.baseline))
    if measured is None:
        return found
    return replace(
        found,
        rate=_rate_of(found, found.best) if outcome is None else outcome.rate,
        speedup=None if outcome is None else outcome.speedup,
        ceiling=state.ceiling_of(found.best),
        wait_share=measured.wait_share,
        first_batch_s=measured.first_batch_s,
        cpu_share=measured.cpu_share,
        memory_bytes=None if measured.memory is None else measured.memory.taken_bytes,
        gpu_busy_share=measured.gpu.busy_share,
        gpu_memory_bytes=measured.gpu.memory_bytes,
    )


def _rate_of(found: TuningResult, config: LoaderConfig) -> Interval | None:
    rates, measured = list(found.rates_of(config).values()), found.measurement_of(config)
    return mean_interval(rates) if len(rates) > 1 else None if measured is None else measured.samples_per_s


def _round_trials(state: SearchState) -> Iterator[Trial]:
    """The bursts of the rounds, numbered after those of the search."""
    if state.finals is None:
        return
    number = len(state.trials)
    left = {config: list(bursts) for config, bursts in state.finals.bursts.items()}
    for place, each in enumerate(state.finals.rounds):
        for config in each.rates:
            if left.get(config):
                burst = left[config].pop(0)
                yield Trial(number=number, config=config, role="search", round=place, measurement=burst)
                number += 1


def _undecided(state: SearchState) -> Finding | None:
    """Why the rounds do not decide; None where they do, or where there was nothing to choose from."""
    outcome, tolerance = state.finals, state.run.tolerance
    tried = {trial.config.key() for trial in state.trials if trial.measurement is not None}
    was_short = len(tried) == 1 and state.stop_reason is StopReason.OUT_OF_BUDGET
    untried = Undecided.ONE_TRIED() if was_short else None
    if outcome is None:
        return Undecided.NO_ROUNDS() if len(tried) > 1 else untried
    if outcome.at_ceiling or len({config.key() for config in outcome.configs}) < 2:
        return untried
    count = len(outcome.rounds)
    busy = sum((each.foreign_cpu_share or 0.0) > FOREIGN_CPU_LIMIT for each in outcome.rounds)
    if busy > MAX_DISCARDED_SHARE * count:
        return Undecided.BUSY(busy=busy, rounds=count)
    if count < MIN_ROUNDS:
        return Undecided.FEW_ROUNDS(rounds=count)
    return Undecided.CLOSE(rounds=count, tolerance=tolerance) if outcome.expected_loss > tolerance else untried


def _job(state: SearchState, epoch_batches: int | None) -> Job:
    context = state.context
    return Job(
        usable_cores=context.usable_cores,
        step_cores=context.consumer_cores,
        step_s=context.step_s_by_threads.get(state.best_threads),
        on_accelerator=not state.run.workload.on_cpu,
        epoch_batches=epoch_batches,
    )


def _warnings(best: LoaderConfig, state: SearchState) -> Iterator[Finding]:
    context, data = state.run, state.run.workload.data
    yield from cautions(best, data)
    yield from (Caution.NOTE(text=note) for note in context.notes)
    if state.finals is not None:
        yield from (Caution.NOTE(text=note) for note in state.finals.notes)
    by_kind: dict[str, list[str]] = {}
    for trial in state.trials:
        if trial.failure is not None:
            by_kind.setdefault(trial.failure.kind, []).append(trial.failure.message)
    for kind, said in sorted(by_kind.items()):
        yield Caution.FAILED(trials=len(said), kind=kind.replace("_", " "), message=said[0])


def cautions(best: LoaderConfig, data: DataSide) -> Iterator[Finding]:
    """What a chosen configuration changes in training."""
    if best.batch_size is not None and data.batch_size:
        ratio = best.batch_size / data.batch_size
        yield Caution.BATCH_SIZE(old=data.batch_size, new=best.batch_size, ratio=ratio, root=ratio**0.5)
    if not best.in_order:
        yield Caution.OUT_OF_ORDER()
    if best.persistent_workers and data.has_epochs:
        yield Caution.EPOCH_NOT_SEEN()


def shuffles(data: DataSide) -> bool | None:
    """Whether the order is random; None where a sampler of the user's decides it."""
    if data.is_iterable or data.has_own_order:
        return None
    return type(data.sampler).__name__ == "RandomSampler"


def loader_parts(workload: Workload) -> dict[str, Any]:
    """What a loader made from the result takes over from the tuned one."""
    data = workload.data
    parts = {"collate_fn": data.collate_fn, "worker_init_fn": data.worker_init_fn, "generator": data.generator}
    if data.has_own_order:
        order = "sampler" if data.batch_sampler is None else "batch_sampler"
        parts |= {order: getattr(data, order), "dataset": data.dataset}
    return {name: value for name, value in parts.items() if value is not None}


class FileAndProgress:
    """Rewrites `loader.json` after every trial and draws a line for it."""

    def __init__(self, output: str | None, progress: Progress, started: float) -> None:
        self._output, self._started, self._progress = output, started, progress
        self.finals_round = progress.round

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
        caution = Caution.NOT_WRITTEN(path=output, why=error.strerror)
        log.warning("%s", caution)
        return replace(result, warnings=(*result.warnings, caution))
    return result
