"""From what a search found to the `TuningResult`: figures, sentences, warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.report.advice.acceleration import acceleration_sentence
from autotune_loader.report.advice.memory import growth_warning
from autotune_loader.report.semantics import consequences
from autotune_loader.report.summary import _rate_words, _speedup_sentence, counted_rounds
from autotune_loader.results.cache import Entry
from autotune_loader.results.loader_file import (
    BatchSizeChoice,
    Finals,
    Measured,
    Predicted,
    Reused,
    Spent,
    Status,
    TwinBasis,
    Verdict,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.recheck import Check
from autotune_loader.tuning.state import SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What was fixed before the search began."""

    workload: Workload
    space: Space
    warmup: WarmupReport
    fingerprint: Fingerprint
    usable_cores: int
    notes: tuple[str, ...]
    tolerance: float | None = None


def assemble(found: SearchState, setting: RunContext, seconds: float, *, final: bool) -> TuningResult:
    """The result of a search, finished or not.

    Args:
        found: trials, ceilings and finals so far.
        setting: workload, space and machine.
        seconds: wall seconds since the call.
        final: whether the search has ended; an unfinished or interrupted one gives status "partial".
    """
    best = _best(found)
    measurement = found.finals.measurement if found.finals is not None else _measurement_of(best, found.trials)
    status = _status(found, final)
    rate = _rate(found, measurement)
    verdict = Verdict(binding="unknown", sentence="No configuration worked, so nothing can be said.")
    advice: tuple[Any, ...] = ()
    growth: str | None = None
    if measurement is not None and rate is not None:
        evidence = _evidence(best, measurement, rate, found, setting)
        verdict = judge(evidence)
        advice = advise(evidence, verdict)
        growth = growth_warning(evidence)
    measured = _measured(best, found, measurement, rate)
    return TuningResult(
        best=best,
        status=status,
        baseline=found.baseline,
        trials=tuple(found.trials),
        batch_size=BatchSizeChoice(
            value=best.batch_size or setting.workload.data.batch_size, tuned=best.batch_size is not None
        ),
        measured=measured,
        predicted=_predicted(best, found, setting),
        verdict=verdict,
        advice=advice,
        summary=_summary(best, found, measured, verdict, status, setting),
        warnings=(*_warnings(best, found, setting), *([growth] if growth is not None else [])),
        finals=_finals(found),
        spent=Spent(seconds=round(seconds, 3), bursts=found.bursts),
        space_hash=setting.space.hash,
        fingerprint=setting.fingerprint,
        twin=_twin_basis(best, found, setting),
        tolerance=setting.tolerance,
        accelerations=found.accelerations,
        study=found.study,
        parts=loader_parts(setting.workload),
    )


def assemble_reused(
    entry: Entry, seen: Check, setting: RunContext, baseline: LoaderConfig, seconds: float, study: Any
) -> TuningResult:
    """An earlier result as the answer of now: its evidence, what the check saw, and what was said of this call.

    Args:
        entry: the earlier result.
        seen: the check that it passed.
        setting: workload, space and machine of now.
        baseline: what the caller has now; the speed-up is over it.
        seconds: wall seconds since the call.
        study: the Optuna study of the earlier trials.
    """
    earlier, rate = entry.result, seen.rate()
    assert rate is not None
    measured = earlier.measured
    then, ratio_now = measured.speedup, seen.speedup
    # A speed-up that was found while the machine was busy need not be that of a quiet one.
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
        f"Step: {setting.warmup.step}.",
    )
    return replace(
        earlier,
        baseline=baseline,
        measured=measured,
        summary=tuple(sentence for sentence in summary if sentence),
        warnings=tuple(dict.fromkeys([*setting.notes, *earlier.warnings])),
        spent=Spent(seconds=round(seconds, 3), bursts=seen.bursts),
        space_hash=setting.space.hash,
        fingerprint=setting.fingerprint,
        reused=reused,
        study=study,
        parts=loader_parts(setting.workload),
    )


def _best(found: SearchState) -> LoaderConfig:
    if found.finals is not None:
        return found.finals.winner
    fastest = found.fastest()
    return fastest.config if fastest is not None else LoaderConfig()


def _status(found: SearchState, final: bool) -> Status:
    if final and not found.interrupted and found.fastest() is None:
        return "fallback"
    return "complete" if final and not found.interrupted else "partial"


def _measurement_of(config: LoaderConfig, trials: Sequence[Trial]) -> Measurement | None:
    """The search's measurement of a configuration, whatever its persistent_workers, which no burst can see."""
    plain = replace(config, persistent_workers=False)
    for trial in reversed(trials):
        if trial.measurement is not None and replace(trial.config, persistent_workers=False) == plain:
            return trial.measurement
    return None


def _rate(found: SearchState, measurement: Measurement | None) -> Interval | None:
    if found.finals is not None:
        return found.finals.rate
    return None if measurement is None else measurement.samples_per_s


def _evidence(
    best: LoaderConfig, measurement: Measurement, rate: Interval, found: SearchState, setting: RunContext
) -> Evidence:
    data = setting.workload.data
    return Evidence(
        best=best,
        measurement=measurement,
        rate=rate,
        ceiling=found.ceiling_of(best),
        usable_cores=setting.usable_cores,
        on_accelerator=not setting.workload.training.device.startswith("cpu"),
        epoch_batches=data.batches_per_epoch(best.batch_size),
        trials=found.trials,
        has_batched_fetch=bool(getattr(data.dataset, "__getitems__", None)),
        twin=fit_twin(found.trials, found.inputs),
        cached_steps=_cached_steps(best, found),
        space=setting.space,
        accelerations=found.accelerations,
    )


def _cached_steps(best: LoaderConfig, found: SearchState) -> tuple[Measurement, ...]:
    """The step on cached batches of the best configuration's size."""
    if best.batch_size is None:
        return tuple(found.ceilings.values())
    measured = found.ceilings_by_batch.get(best.batch_size)
    return () if measured is None else (measured,)


def _measured(
    best: LoaderConfig, found: SearchState, measurement: Measurement | None, rate: Interval | None
) -> Measured:
    baseline = _measurement_of(found.baseline, found.trials)
    values: dict[str, Any] = {
        "samples_per_s": rate,
        "baseline_samples_per_s": None if baseline is None else baseline.samples_per_s,
        "speedup": None if found.finals is None else found.finals.speedup,
        "ceiling_samples_per_s": found.ceiling_of(best),
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


def _predicted(best: LoaderConfig, found: SearchState, setting: RunContext) -> Predicted:
    twin = fit_twin(found.trials, found.inputs) if best.batch_size is None else None
    if twin is None:
        return Predicted()
    epoch_batches = setting.workload.data.batches_per_epoch(best.batch_size)
    prediction = twin.predict_all([best], epoch_batches=epoch_batches)[0]
    samples = setting.workload.data.samples_per_epoch()
    epoch_s = samples / prediction.epoch_samples_per_s if samples and prediction.epoch_samples_per_s > 0 else None
    return Predicted(samples_per_s=prediction.samples_per_s, epoch_s=epoch_s)


def _twin_basis(best: LoaderConfig, found: SearchState, setting: RunContext) -> TwinBasis:
    inputs = found.inputs
    return TwinBasis(
        usable_cores=inputs.usable_cores,
        consumer_cores=inputs.consumer_cores,
        step_s=tuple(inputs.step_s_by_threads.items()),
        epoch_batches=setting.workload.data.batches_per_epoch(best.batch_size),
    )


def _finals(found: SearchState) -> Finals:
    if found.finals is None:
        return Finals()
    keys = range(len(found.finals.configs))
    rounds = tuple(tuple(each.rates.get(str(key)) for key in keys) for each in found.finals.rounds)
    return Finals(configs=found.finals.configs, rounds=rounds, whole_epochs=found.whole_epochs)


def _summary(
    best: LoaderConfig, found: SearchState, measured: Measured, verdict: Verdict, status: Status, setting: RunContext
) -> tuple[str, ...]:
    if status == "fallback":
        kinds = sorted({f"{t.failure.kind}: {t.failure.message}" for t in found.trials if t.failure is not None})
        return ("No configuration worked; torch's defaults are given as a fallback.", *kinds)
    sentences = [f"Use {best}: {_rate_words(measured.samples_per_s)}."]
    sentences.append(_speedup_sentence(best, found.baseline, measured.speedup))
    sentences.append(verdict.sentence)
    sentences.append(f"Step: {setting.warmup.step}. Search ended because {found.stopped_because or 'it was asked to'}.")
    sentences += [f"{acceleration_sentence(each)}." for each in found.accelerations]
    if found.finals is not None and found.whole_epochs:
        sentences.append(
            "Epochs are short, so the finals ran whole ones: their rates include start-up and the gaps between."
        )
    if status == "partial":
        sentences.insert(0, "Interrupted: this is the best found so far.")
    return tuple(sentence for sentence in sentences if sentence)


def _warnings(best: LoaderConfig, found: SearchState, setting: RunContext) -> tuple[str, ...]:
    notes = [*consequences(best, setting.workload.data), *setting.notes]
    if found.finals is not None:
        notes += found.finals.notes
    failed = [trial for trial in found.trials if trial.failure is not None]
    for kind in sorted({trial.failure.kind for trial in failed if trial.failure is not None}):
        same = [trial for trial in failed if trial.failure is not None and trial.failure.kind == kind]
        assert same[0].failure is not None
        notes.append(f"{len(same)} trial(s) failed ({kind}): {same[0].failure.message}")
    return tuple(dict.fromkeys(notes))


def loader_parts(workload: Workload) -> dict[str, Any]:
    """What a loader made from the result takes over from the tuned one."""
    data = workload.data
    parts = {"collate_fn": data.collate_fn, "worker_init_fn": data.worker_init_fn, "generator": data.generator}
    return {name: value for name, value in {**parts, "drop_last": data.drop_last or None}.items() if value is not None}
