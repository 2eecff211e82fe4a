"""From what a search state to the `TuningResult`: figures, sentences, warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune_loader.decision.belief import fit_twin
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.report.advice.acceleration import acceleration_sentence
from autotune_loader.report.advice.memory import growth_warning
from autotune_loader.report.semantics import consequences
from autotune_loader.report.summary import _rate_words, _speedup_sentence, counted_rounds, why_it_ended
from autotune_loader.results.cache import Entry
from autotune_loader.results.loader_file import (
    BatchSizeChoice,
    Finals,
    Measured,
    Predicted,
    Reused,
    Spent,
    Status,
    Verdict,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.recheck import Recheck
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.twin import Twin
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial


def assemble(state: SearchState, context: RunContext, seconds: float, *, final: bool) -> TuningResult:
    """The result of a search, finished or not.

    Args:
        state: trials, ceilings and finals so far.
        context: workload, space and machine.
        seconds: wall seconds since the call.
        final: whether the search has ended; an unfinished or interrupted one gives status "partial".
    """
    best = _best(state)
    measurement = state.finals.measurement if state.finals is not None else _measurement_of(best, state.trials)
    status = _status(state, final)
    rate = _rate(state, measurement)
    verdict = Verdict(binding="unknown", sentence="No configuration worked, so nothing can be said.")
    advice: tuple[Any, ...] = ()
    growth: str | None = None
    if measurement is not None and rate is not None:
        evidence = _evidence(best, measurement, rate, state, context)
        verdict = judge(evidence)
        advice = advise(evidence, verdict)
        growth = growth_warning(evidence)
    measured = _measured(best, state, measurement, rate)
    return TuningResult(
        best=best,
        status=status,
        baseline=state.baseline,
        trials=tuple(state.trials),
        batch_size=BatchSizeChoice(
            value=best.batch_size or context.workload.data.batch_size, tuned=best.batch_size is not None
        ),
        measured=measured,
        predicted=_predicted(best, state, context),
        verdict=verdict,
        advice=advice,
        summary=_summary(best, state, measured, verdict, status, context),
        warnings=(*_warnings(best, state, context), *([growth] if growth is not None else [])),
        finals=_finals(state),
        spent=Spent(seconds=round(seconds, 3), bursts=state.bursts),
        space_hash=context.space.hash,
        fingerprint=context.fingerprint,
        twin=_twin_context(best, state, context),
        tolerance=context.tolerance,
        accelerations=state.accelerations,
        study=state.study,
        parts=loader_parts(context.workload),
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
    then, ratio_now = measured.speedup, seen.speedup
    # A speed-up that was state while the machine was busy need not be that of a quiet one.
    is_refuted = then is not None and ratio_now is not None and not then.low <= ratio_now.value <= then.high
    if baseline != earlier.baseline or (is_refuted and seen.partner == baseline):
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
    summary = (
        f"Reused: tuned at {reused.tuned_at} in {reused.seconds:.0f} s, and checked now in {counted_rounds(reused.rounds)}: "
        f"{rate:,.0f} samples/s{paired}.",
        f"Use {earlier.best}: {_rate_words(measured.samples_per_s)}.",
        _speedup_sentence(earlier.best, baseline, measured.speedup),
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


def _status(state: SearchState, final: bool) -> Status:
    if final and not state.interrupted and state.fastest() is None:
        return "fallback"
    return "complete" if final and not state.interrupted else "partial"


def _measurement_of(config: LoaderConfig, trials: Sequence[Trial]) -> Measurement | None:
    """The search's measurement of a configuration, whatever its persistent_workers, which no burst can see."""
    for trial in reversed(trials):
        if trial.measurement is not None and trial.config.key() == config.key():
            return trial.measurement
    return None


def _rate(state: SearchState, measurement: Measurement | None) -> Interval | None:
    if state.finals is not None:
        return state.finals.rate
    return None if measurement is None else measurement.samples_per_s


def _evidence(
    best: LoaderConfig, measurement: Measurement, rate: Interval, state: SearchState, context: RunContext
) -> Evidence:
    data = context.workload.data
    return Evidence(
        best=best,
        measurement=measurement,
        rate=rate,
        ceiling=state.ceiling_of(best),
        usable_cores=context.usable_cores,
        on_accelerator=not context.workload.training.device.startswith("cpu"),
        epoch_batches=data.batches_per_epoch(best.batch_size),
        trials=state.trials,
        has_batched_fetch=bool(getattr(data.dataset, "__getitems__", None)),
        twin=_twin(state),
        cached_steps=_cached_steps(best, state),
        space=context.space,
        accelerations=state.accelerations,
    )


def _cached_steps(best: LoaderConfig, state: SearchState) -> tuple[Measurement, ...]:
    """The step on cached batches of the best configuration's size."""
    if best.batch_size is None:
        return tuple(state.ceilings.values())
    measured = state.ceilings_by_batch.get(best.batch_size)
    return () if measured is None else (measured,)


def _measured(
    best: LoaderConfig, state: SearchState, measurement: Measurement | None, rate: Interval | None
) -> Measured:
    baseline = _measurement_of(state.baseline, state.trials)
    values: dict[str, Any] = {
        "samples_per_s": rate,
        "baseline_samples_per_s": None if baseline is None else baseline.samples_per_s,
        "speedup": None if state.finals is None else state.finals.speedup,
        "ceiling_samples_per_s": state.ceiling_of(best),
    }
    if measurement is not None:
        values |= {
            "wait_share": measurement.wait_share,
            "first_batch_s": measurement.first_batch_s,
            "cpu_share": measurement.cpu_share,
            "gpu_util": measurement.gpu.util,
            "gpu_util_reason": measurement.gpu.reason,
            "gpu_memory_bytes": measurement.gpu.memory_bytes,
        }
        if measurement.memory is not None:
            memory = measurement.memory
            values |= {
                "rss_bytes": memory.rss_bytes,
                "pss_bytes": memory.pss_bytes,
                "pss_slope_bytes_per_s": memory.pss_slope_bytes_per_s,
                "shm_bytes": memory.shm_bytes,
            }
    return Measured(**values)


def _predicted(best: LoaderConfig, state: SearchState, context: RunContext) -> Predicted:
    twin = _twin(state) if best.batch_size is None else None
    if twin is None:
        return Predicted()
    epoch_batches = context.workload.data.batches_per_epoch(best.batch_size)
    prediction = twin.predict_all([best], epoch_batches=epoch_batches)[0]
    samples = _samples_per_epoch(context.workload.data, epoch_batches, _measurement_of(best, state.trials))
    epoch_s = samples / prediction.epoch_samples_per_s if samples and prediction.epoch_samples_per_s > 0 else None
    return Predicted(samples_per_s=prediction.samples_per_s, epoch_s=epoch_s)


def _samples_per_epoch(data: DataSide, batches: int | None, measured: Measurement | None) -> float | None:
    """Where the dataset makes the batches, its length is that of batches."""
    if data.batch_size is not None or batches is None or measured is None:
        return data.samples_per_epoch()
    return batches * measured.batch_size


def _twin_context(best: LoaderConfig, state: SearchState, context: RunContext) -> TwinContext:
    return replace(state.context, epoch_batches=context.workload.data.batches_per_epoch(best.batch_size))


def _twin(state: SearchState) -> Twin | None:
    """The twin of the search's bursts, as `predict()` makes it from a file."""
    return fit_twin([(t.config, t.measurement) for t in state.trials if t.measurement is not None], state.context)


def _finals(state: SearchState) -> Finals:
    if state.finals is None:
        return Finals()
    configs = state.finals.configs
    rounds = tuple(tuple(each.rates.get(config) for config in configs) for each in state.finals.rounds)
    return Finals(configs=configs, rounds=rounds, whole_epochs=state.whole_epochs)


def _summary(
    best: LoaderConfig, state: SearchState, measured: Measured, verdict: Verdict, status: Status, context: RunContext
) -> tuple[str, ...]:
    if status == "fallback":
        kinds = sorted({f"{t.failure.kind}: {t.failure.message}" for t in state.trials if t.failure is not None})
        return ("No configuration worked; torch's defaults are given as a fallback.", *kinds)
    unit = "batches/s" if context.warmup.counts_batches else "samples/s"
    sentences = [f"Use {best}: {_rate_words(measured.samples_per_s, unit)}."]
    sentences.append(_speedup_sentence(best, state.baseline, measured.speedup))
    sentences.append(verdict.sentence)
    sentences.append(f"Step: {context.warmup.step}. {why_it_ended(state.stop_reason)}")
    sentences += [f"{acceleration_sentence(each)}." for each in state.accelerations]
    if state.finals is not None and state.whole_epochs:
        sentences.append(
            "Epochs are short, so the finals ran whole ones: their rates include start-up and the gaps between."
        )
    if status == "partial":
        sentences.insert(0, "Interrupted: this is the best state so far.")
    return tuple(sentence for sentence in sentences if sentence)


def _warnings(best: LoaderConfig, state: SearchState, context: RunContext) -> tuple[str, ...]:
    notes = [*consequences(best, context.workload.data), *context.notes]
    if state.finals is not None:
        notes += state.finals.notes
    failed = [trial for trial in state.trials if trial.failure is not None]
    for kind in sorted({trial.failure.kind for trial in failed if trial.failure is not None}):
        same = [trial for trial in failed if trial.failure is not None and trial.failure.kind == kind]
        assert same[0].failure is not None
        notes.append(f"{len(same)} trial(s) failed ({kind}): {same[0].failure.message}")
    return tuple(dict.fromkeys(notes))


def loader_parts(workload: Workload) -> dict[str, Any]:
    """What a loader made from the result takes over from the tuned one."""
    data = workload.data
    parts = {"collate_fn": data.collate_fn, "worker_init_fn": data.worker_init_fn, "generator": data.generator}
    if data.has_own_order:
        order = "sampler" if data.batch_sampler is None else "batch_sampler"
        parts |= {order: getattr(data, order), "dataset": data.dataset}
    return {name: value for name, value in {**parts, "drop_last": data.drop_last or None}.items() if value is not None}
