"""From a search to its `TuningResult`: what is chosen, whether that is a guess, and what has to be known of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone

from autotune_loader.bursts.settings import LACKS
from autotune_loader.diagnosis import Caution, Ended, Undecided, judged
from autotune_loader.diagnosis.evidence import FOREIGN_CPU_LIMIT
from autotune_loader.diagnosis.judge import changes_in_training, source_of
from autotune_loader.report.perfetto import write_trace
from autotune_loader.results.result import Finding, Status, TuningResult
from autotune_loader.search.belief import CERTAIN, Belief
from autotune_loader.search.draws import equally_fast
from autotune_loader.search.turns import LEAST_ROUNDS
from autotune_loader.tuning.study import Search
from autotune_loader.values import Effects, LoaderConfig, LoaderTrace, log_ratios
from autotune_loader.values.trace import pooled, stage_times

log = logging.getLogger(__name__)

MUCH_DISTURBED = 1 / 3
"""With others on the cores in more than this share of the rounds, what they say is the neighbours' as well."""


def assembled(search: Search, seconds: float) -> TuningResult:
    """The result of a search after so many wall seconds."""
    best, undecided = choice_of(search)
    if search.belief.choice is not None:
        best = search.keep_workers_of(best)
    run, data, warmup, belief = search.run, search.run.workload.data, search.run.warmup, search.belief
    handed = search.handed_over
    status: Status = "complete" if undecided is None else "undecided"
    ended = search.ended
    if belief.choice is None:
        status, ended = "fallback", Ended.FALLBACK
    elif ended is Ended.INTERRUPTED:
        status = "partial"
    found = TuningResult(
        best=best,
        status=status,
        baseline=run.baseline,
        tuned_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        batch_size=best.batch_size or data.batch_size,
        shuffle=run.workload.shuffles,
        drop_last=data.drop_last,
        rate_unit=warmup.rate_unit,
        ceiling=None if search.ceiling is None or best.batch_size else search.ceiling.samples_per_s,
        transfer_ceiling=None if handed is None or best.batch_size or best.device_prefetch else handed.samples_per_s,
        undecided=undecided,
        ended=ended(
            tolerance=run.tolerance,
            which="" if search.twin.is_open else " that ran",
            ceiling="the step alone" if search.least_ceiling is search.ceiling else "DataLoader can transfer batches",
        ),
        step=warmup.step,
        stages=stage_times(pooled(each.measurement.stages for each in search.trials if each.measurement)),
        warnings=tuple(_cautions(search, best)),
        tolerance=run.tolerance,
        seconds=round(seconds, 3),
        step_s=search.bursts.context.step_s,
        step_cores=search.bursts.context.step_cores,
        machine=run.fingerprint,
        trials=tuple(search.trials),
        study=search.study,
    )
    if (own := found.measurement_of(run.baseline)) is not None:
        found = replace(found, baseline_rate=own.samples_per_s)
    if (measured := found.measurement_of(best)) is not None:
        found = replace(
            found,
            rate=measured.samples_per_s,
            wait_share=measured.wait_share,
            memory_bytes=measured.taken_bytes,
            gpu_busy_share=measured.gpu_busy_share,
            gpu_utilization=measured.gpu_utilization,
            source=source_of(measured, data, run.machine),
        )
    if any(best in each.rates for each in belief.rounds):
        effects = Effects(belief.rounds)
        speedup = effects.ratio(best, run.baseline) if best != run.baseline in effects.keys else None
        # Any that is not shown to be slower by more than the tolerance might have been chosen by these rounds.
        contenders = [effects.ratio(each, best).high >= 1 - run.tolerance for each in effects.keys if each != best]
        found = replace(
            found,
            rate=effects.rate(best, chosen_of=1 + sum(contenders)),
            speedup=speedup if speedup is not None and speedup.count else None,
            as_fast=() if undecided is not None else _as_fast(belief, effects, best),
        )
    return judged(
        found,
        epoch_batches=data.batches_per_epoch(best.batch_size),
        on_accelerator=not run.workload.on_cpu,
        has_batched_fetch=data.has_batched_fetch,
    )


def choice_of(search: Search) -> tuple[LoaderConfig, Finding | None]:
    """What to use, and why the bursts do not decide it, where they do not.

    Undecided it is the user's own, unless something that ran is almost certainly faster.
    """
    belief, baseline = search.belief, search.run.baseline
    if belief.choice is None:
        return LoaderConfig(), None
    measured = list(dict.fromkeys(each.config for each in belief.trials if each.samples_per_s))
    works = [config for config in measured if config.key() in belief.configs]
    if not works:  # what worked at first has failed since
        return measured[0], Undecided.FAILS_NOW()
    ran = [config for config in works if sum(config in each.rates for each in belief.rounds) >= LEAST_ROUNDS]
    best = belief.choice_of(ran or works)
    undecided = None if search.ended is Ended.INTERRUPTED else _why_undecided(search, best)
    if undecided is None or best == baseline or baseline not in works:
        return best, undecided
    was_faster = sum(log_ratios(belief.rounds, best, baseline)) >= 0  # or nobody would believe the choice
    return best if was_faster and belief.is_faster(best, baseline) >= CERTAIN else baseline, undecided


def _why_undecided(search: Search, best: LoaderConfig) -> Finding | None:
    """Why the bursts do not decide, and what would; None where they do."""
    belief, rounds, tolerance = search.belief, len(search.belief.rounds), search.run.tolerance
    busy, had_time = _disturbed(belief), search.ended is not Ended.BUDGET
    tried = {trial.config.key() for trial in belief.trials if trial.samples_per_s}
    if len(belief.configs) > 1 and busy > MUCH_DISTURBED * rounds:
        return Undecided.BUSY(busy=busy, rounds=rounds)
    if belief.loss(best) > tolerance or belief.contradiction(best) is not None:
        if not rounds:
            return Undecided.NO_ROUNDS() if len(tried) > 1 else Undecided.ONE_TRIED()
        return (Undecided.TOO_NOISY if had_time else Undecided.CLOSE)(rounds=rounds, tolerance=tolerance)
    if rounds < LEAST_ROUNDS and not had_time:
        return Undecided.FEW_ROUNDS(rounds=rounds) if rounds else Undecided.NO_ROUNDS()
    return None


def _as_fast(belief: Belief, effects: Effects, best: LoaderConfig) -> tuple[LoaderConfig, ...]:
    """Who counts as equally fast of those that ran in rounds, by the rule that made the choice; none of them is cheaper."""
    ran, cost = [each for each in effects.keys if each.key() in belief.configs], belief.space.cost
    equal = [ran[index] for index in equally_fast(belief.draws.of([each.key() for each in ran]), belief.tolerance)]
    return tuple(each for each in equal if each != best and cost(each) >= cost(best))


def _disturbed(belief: Belief) -> int:
    """In how many rounds others kept the cores busy."""
    return sum((each.foreign_cpu_share or 0.0) > FOREIGN_CPU_LIMIT for each in belief.rounds)


def _cautions(search: Search, best: LoaderConfig) -> Iterator[Finding]:
    """What has to be known before it is used."""
    belief = search.belief
    yield from changes_in_training(best, search.run.workload.data)
    if best.persistent_workers and not search.run.baseline.persistent_workers:
        yield Caution.WORKERS_KEPT()
    if belief.choice is not None:
        # Whether workers of anything that ran start for more than the tolerance of an epoch.
        tried = {trial.config.key() for trial in belief.trials if trial.samples_per_s}
        starts = (belief.sustained.paths - belief.draws.paths).mean(axis=0)
        if any(log > belief.tolerance for config, log in zip(belief.configs, starts, strict=True) if config in tried):
            yield Caution.EPOCH_STARTS()
    for each in search.run.notes:
        step_s = search.bursts.context.step_s or 0.0
        yield Caution.LACKS(text=each, step=step_s) if each.startswith(LACKS) else Caution.NOTE(text=each)
    if busy := _disturbed(belief):
        yield Caution.DISTURBED(limit=FOREIGN_CPU_LIMIT, busy=busy, rounds=len(belief.rounds))
    failures = [trial.failure for trial in search.trials if trial.failure is not None]
    for kind in sorted({each.kind for each in failures}):
        messages = [each.message for each in failures if each.kind == kind]
        yield Caution.FAILED(trials=len(messages), kind=kind, message=messages[0])


def saved(result: TuningResult, output: str | None, trace: str | None = None) -> TuningResult:
    """The result, written where that was asked for. A disk that is full by now costs a warning, not the result."""
    if trace is not None:
        try:
            write_trace(trace, traced(result))
        except OSError as error:
            result = _warned(result, Caution.NOTE(text=f"{trace} was not written ({_why(error)})."))
    if output is not None:
        try:
            result.save(output)
        except OSError as error:
            result = _warned(result, Caution.NOT_WRITTEN(path=output, why=_why(error)))
    return result


def traced(result: TuningResult) -> list[LoaderTrace]:
    """The single batches of each trial that has some."""
    trials = [(trial, trial.measurement.traces) for trial in result.trials if trial.measurement]
    return [
        LoaderTrace(f"trial {trial.number}: {trial.config}", dict(enumerate(traces, 1)))
        for trial, traces in trials
        if traces
    ]


def _warned(result: TuningResult, told: Finding) -> TuningResult:
    log.warning("%s", told.sentence)
    return replace(result, warnings=(*result.warnings, told))


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
