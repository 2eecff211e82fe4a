"""From what a search state to the `TuningResult`: figures, sentences, warnings."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.rounds import averaged
from autotune_loader.decision.stopping import StopReason
from autotune_loader.pipeline.held_objects import largest_held
from autotune_loader.pipeline.stages import pooled, stage_times
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.probe.bench import SLOW_FETCH_S
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.report.advice.memory import growth_warning
from autotune_loader.report.ceiling import ceiling_doubt
from autotune_loader.report.semantics import consequences
from autotune_loader.report.standings import DEFAULT_TOLERANCE, measurement_of, rate_of
from autotune_loader.report.summary import (
    NOTHING_COMPARED,
    UNDECIDED,
    rate_words,
    speedup_sentence,
    why_it_ended,
    why_undecided,
)
from autotune_loader.report.units import counted
from autotune_loader.results.cache import Entry
from autotune_loader.results.loader_file import (
    BatchSizeChoice,
    Finals,
    Measured,
    Predicted,
    RateUnit,
    Reused,
    Spent,
    Status,
    Verdict,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.recheck import Recheck
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.twin import Twin
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Measurement
from autotune_loader.values.statistics import Interval, mean_share

NO_VERDICT = Verdict(binding="unknown", sentence="No configuration worked, so nothing can be said.")

MOST_NAMED = 4
"""Bad samples of one kind."""


def assemble(state: SearchState, context: RunContext, seconds: float, *, final: bool) -> TuningResult:
    """The result of a search, finished or not.

    Args:
        state: trials, ceilings and finals so far.
        context: workload, space and machine.
        seconds: wall seconds since the call.
        final: whether the search has ended; an unfinished or interrupted one gives status "partial".
    """
    best, finals, trials = _best(state), _finals(state, context), tuple(state.trials)
    data = context.workload.data
    found = TuningResult(
        best=best,
        status=_status(state, finals, final),
        baseline=state.baseline,
        trials=trials,
        batch_size=BatchSizeChoice(value=best.batch_size or data.batch_size, tuned=best.batch_size is not None),
        measured=_measured(best, state, finals, "batches/s" if context.warmup.counts_batches else "samples/s"),
        predicted=_predicted(best, state, finals, context),
        finals=finals,
        spent=Spent(seconds=round(seconds, 3), bursts=state.bursts),
        space_hash=context.space.hash,
        fingerprint=context.fingerprint,
        twin=replace(
            state.context, epoch_batches=data.batches_per_epoch(best.batch_size or context.warmup.burst_batch_size)
        ),
        stage_times=stage_times(pooled(trial.measurement.stages for trial in trials if trial.measurement is not None)),
        tolerance=context.tolerance,
        study=state.study,
        parts=loader_parts(context.workload),
    )
    doubt = ceiling_doubt(found)
    if doubt is not None:
        found = replace(found, measured=replace(found.measured, ceiling_samples_per_s=None, ceiling_doubt=doubt))
    evidence = _evidence(found, state, context)
    verdict = judge(evidence) if evidence is not None else NO_VERDICT
    growth = growth_warning(evidence) if evidence is not None else None
    return replace(
        found,
        verdict=verdict,
        advice=advise(evidence, verdict) if evidence is not None else (),
        summary=_summary(found, state, verdict, context),
        warnings=(
            *_bad_samples(state, context),
            *_warnings(best, state, context, finals),
            *([growth] if growth is not None else []),
        ),
    )


def assemble_reused(
    entry: Entry, seen: Recheck, context: RunContext, baseline: LoaderConfig, seconds: float, study: Any
) -> TuningResult:
    """An earlier result as the answer of now: its evidence, what the check saw, and what was said of this call.

    Args:
        entry: the earlier result.
        seen: the check that it passed.
        context: workload, space and machine of now.
        baseline: what the caller has now; the speed-up is over it.
        seconds: wall seconds since the call.
        study: the Optuna study of the earlier trials.
    """
    earlier, rate = entry.result, seen.rate()
    assert rate is not None
    measured = earlier.measured
    # A speed-up that was stated while the machine was busy need not be that of a quiet one.
    if baseline != earlier.baseline or (seen.refutes(measured.speedup) and seen.partner == baseline):
        now = seen.rate("partner") if seen.partner == baseline else rate
        unsure = None if now is None else Interval(value=now, low=-math.inf, high=math.inf, count=len(seen.rounds))
        speedup = seen.speedup if seen.partner == baseline else None
        measured = replace(measured, speedup=speedup, baseline_samples_per_s=unsure)
    ratio = None if seen.speedup is None else seen.speedup.value
    paired = "" if ratio is None else f", {ratio:.2f}x as fast as {seen.partner}"
    reused = Reused(
        tuned_at=entry.note.tuned_at,
        samples_per_s=rate,
        speedup=ratio,
        rounds=len(seen.rounds),
        seconds=earlier.spent.seconds,
    )
    doubt = earlier.summary[0] if earlier.status == "undecided" else ""
    rounds = counted(reused.rounds, "paired round")
    summary = (
        doubt,
        f"Reused: tuned at {reused.tuned_at} in {reused.seconds:.0f} s, and checked now in {rounds}: "
        f"{rate:,.0f} samples/s{paired}{'; ' if seen.why_long else ''}{seen.why_long}.",
        f"Use {earlier.best}: {rate_words(measured.samples_per_s)}.",
        speedup_sentence(earlier.best, baseline, measured.speedup, is_decided=not doubt),
        earlier.verdict.sentence,
        f"Step: {context.warmup.step}.",
    )
    return replace(
        earlier,
        baseline=baseline,
        measured=measured,
        summary=tuple(sentence for sentence in summary if sentence),
        warnings=tuple(dict.fromkeys([*context.notes, *earlier.warnings])),
        spent=Spent(seconds=round(seconds, 3), bursts=seen.bursts),
        space_hash=context.space.hash,
        fingerprint=context.fingerprint,
        reused=reused,
        study=study,
        parts=loader_parts(context.workload),
    )


def _best(state: SearchState) -> LoaderConfig:
    if state.finals is not None:
        return state.finals.winner
    fastest = state.fastest()
    return fastest.config if fastest is not None else LoaderConfig()


def _status(state: SearchState, finals: Finals, final: bool) -> Status:
    if not final or state.interrupted:
        return "partial"
    if state.fastest() is None:
        return "fallback"
    return "complete" if finals.undecided is None else "undecided"


def _evidence(found: TuningResult, state: SearchState, context: RunContext) -> Evidence | None:
    """What the verdict rests on; None where nothing worked."""
    data, best, rate = context.workload.data, found.best, found.measured.samples_per_s
    measurement = measurement_of(best, found.finals, found.trials)
    if measurement is None or rate is None:
        return None
    return Evidence(
        best=best,
        measurement=measurement,
        rate=rate,
        ceiling=found.ceiling,
        ceiling_doubt=found.measured.ceiling_doubt,
        usable_cores=context.usable_cores,
        on_accelerator=not context.workload.on_cpu,
        epoch_batches=data.batches_per_epoch(best.batch_size or context.warmup.burst_batch_size),
        trials=state.trials,
        has_batched_fetch=bool(getattr(data.dataset, "__getitems__", None)),
        twin=_twin(state),
        space=context.space,
        stage_times=found.stage_times,
        held=largest_held(data.dataset),
    )


def _measured(best: LoaderConfig, state: SearchState, finals: Finals, unit: RateUnit) -> Measured:
    """Every figure from where the table has it, too."""
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
        gpu_util_reason=measurement.gpu.reason,
        gpu_memory_bytes=measurement.gpu.memory_bytes,
        **({} if measurement.memory is None else asdict(measurement.memory)),
    )


def _predicted(best: LoaderConfig, state: SearchState, finals: Finals, context: RunContext) -> Predicted:
    twin = _twin(state) if best.batch_size is None else None
    if twin is None:
        return Predicted()
    epoch_batches = context.workload.data.batches_per_epoch(best.batch_size or context.warmup.burst_batch_size)
    prediction = twin.predict_all([best], epoch_batches=epoch_batches)[0]
    measured = measurement_of(best, finals, state.trials)
    samples = _samples_per_epoch(context.workload.data, epoch_batches, measured)
    epoch_s = samples / prediction.epoch_samples_per_s if samples and prediction.epoch_samples_per_s > 0 else None
    return Predicted(samples_per_s=prediction.samples_per_s, epoch_s=epoch_s)


def _samples_per_epoch(data: DataSide, batches: int | None, measured: Measurement | None) -> float | None:
    """Where the dataset makes the batches, its length is that of batches."""
    if data.batch_size is not None or batches is None or measured is None:
        return data.samples_per_epoch()
    return batches * measured.batch_size


def _twin(state: SearchState) -> Twin | None:
    """The twin of the search's bursts, as `predict()` makes it from a file."""
    return fit_twin([(t.config, t.measurement) for t in state.trials if t.measurement is not None], state.context)


def _finals(state: SearchState, context: RunContext) -> Finals:
    outcome, tolerance = state.finals, context.tolerance or DEFAULT_TOLERANCE
    tried = {trial.config.key() for trial in state.trials if trial.measurement is not None}
    untried = NOTHING_COMPARED if len(tried) == 1 and state.stop_reason is StopReason.OUT_OF_BUDGET else None
    if outcome is None:
        return Finals(undecided=why_undecided(None, tolerance) if len(tried) > 1 else untried)
    return Finals(
        configs=outcome.configs,
        rounds=tuple(tuple(each.rates.get(config) for config in outcome.configs) for each in outcome.rounds),
        whole_epochs=state.whole_epochs,
        foreign_cpu_share=tuple(each.foreign_cpu_share for each in outcome.rounds),
        measurements=tuple(
            averaged(outcome.bursts[config]) if config in outcome.bursts else None for config in outcome.configs
        ),
        as_fast=outcome.as_fast,
        undecided=why_undecided(outcome, tolerance) or untried,
    )


def _summary(found: TuningResult, state: SearchState, verdict: Verdict, context: RunContext) -> tuple[str, ...]:
    best, measured = found.best, found.measured
    if found.status == "fallback":
        kinds = sorted({f"{t.failure.kind}: {t.failure.message}" for t in state.trials if t.failure is not None})
        return ("No configuration worked; torch's defaults are given as a fallback.", *kinds)
    sentences = []
    if found.status == "partial":
        sentences.append("Interrupted: this is the best state so far.")
    if found.status == "undecided":
        sentences.append(f"{UNDECIDED}: {found.finals.undecided}. Until then this is the safest guess.")
    is_decided = found.status == "complete"
    sentences.append(f"Use {best}: {rate_words(measured.samples_per_s, measured.rate_unit)}.")
    sentences.append(speedup_sentence(best, state.baseline, measured.speedup, is_decided=is_decided))
    sentences.append(verdict.sentence)
    sentences.append(f"Step: {context.warmup.step}. {why_it_ended(state.stop_reason)}")
    if state.finals is not None and state.whole_epochs:
        sentences.append(
            "Epochs are short, so the finals ran whole ones: their rates include start-up and the gaps between."
        )
    return tuple(sentence for sentence in sentences if sentence)


def _warnings(best: LoaderConfig, state: SearchState, context: RunContext, finals: Finals) -> tuple[str, ...]:
    notes = [*consequences(best, context.workload.data), *context.notes]
    if state.finals is not None:
        # That the rounds were disturbed is said where the choice is called undecided.
        notes += state.finals.failures if finals.undecided is not None else state.finals.notes
    notes += _about_slow_batches(state, context)
    failed = [trial for trial in state.trials if trial.failure is not None]
    for kind in sorted({trial.failure.kind for trial in failed if trial.failure is not None}):
        same = [trial for trial in failed if trial.failure is not None and trial.failure.kind == kind]
        assert same[0].failure is not None
        notes.append(f"{counted(len(same), 'trial')} failed ({kind}): {same[0].failure.message}")
    return tuple(dict.fromkeys(notes))


def _bad_samples(state: SearchState, context: RunContext) -> list[str]:
    """What training will trip over: a sentence for each class of exception that samples raised."""
    measured = [trial.measurement for trial in state.trials]
    measured += [state.finals.measurement] if state.finals is not None else []
    found = [*context.warmup.bad_samples, *(bad for each in measured if each is not None for bad in each.bad_samples)]
    by_class: dict[str, dict[str, BadSample]] = {}
    for bad in found:
        by_class.setdefault(bad.error.partition(":")[0], {}).setdefault(bad.name, bad)
    sentences = []
    for bads in by_class.values():
        names, first = list(bads), next(iter(bads.values()))
        others = f", like {', '.join(names[1:MOST_NAMED])}" + (" and others" if len(names) > MOST_NAMED else "")
        sentences.append(
            f"{first.name} raises {first.error}{others if names[1:] else ''}; training will end there (bursts leave it out)"
        )
    return sentences


def _about_slow_batches(state: SearchState, context: RunContext) -> list[str]:
    """What must be said of rates where a batch takes seconds."""
    if context.warmup.first_fetch_s <= SLOW_FETCH_S or state.finals is not None:
        return []
    return [
        f"a batch takes about {context.warmup.first_fetch_s:.0f} s to fetch in one process, so there was no time for paired "
        "rounds (a larger budget has some)"
    ]


def loader_parts(workload: Workload) -> dict[str, Any]:
    """What a loader made from the result takes over from the tuned one."""
    data = workload.data
    parts = {"collate_fn": data.collate_fn, "worker_init_fn": data.worker_init_fn, "generator": data.generator}
    if data.has_own_order:
        order = "sampler" if data.batch_sampler is None else "batch_sampler"
        parts |= {order: getattr(data, order), "dataset": data.dataset}
    return {name: value for name, value in {**parts, "drop_last": data.drop_last or None}.items() if value is not None}
