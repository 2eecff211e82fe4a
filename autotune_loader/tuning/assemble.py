"""From a search to its `TuningResult`: what is chosen, whose figures it holds, and what has to be known before it is used.

What limits the rate, and what to do about it, is said by `diagnosis`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from autotune_loader.diagnosis import Caution, Ended, Source, Undecided, judged
from autotune_loader.diagnosis.evidence import FOREIGN_CPU_LIMIT
from autotune_loader.diagnosis.units import MUCH_FASTER
from autotune_loader.machine.facts import Machine
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.results.record import Finding, Status
from autotune_loader.results.result import TuningResult
from autotune_loader.search.rounds import RoundsEnd
from autotune_loader.tuning.study import Search
from autotune_loader.values import (
    HAND_OVER,
    OTHER_THREADS,
    Interval,
    LoaderConfig,
    Measurement,
    Seen,
    StageSamples,
    StageTime,
    log_ratios,
    mean_interval,
    pooled,
)

log = logging.getLogger(__name__)

FEW_ROUNDS = 2
"""An interval of fewer rounds says nothing, and two that agree on who is faster are believed."""
FROM_MEMORY_BYTES = 64
"""Less than this for each sample is what reading the code of the first batch takes."""
MUCH_DISTURBED = 1 / 3
"""With others on the cores in more than this share of the rounds, what they say is the neighbours' as well."""
OTHERS_SHARE = 0.05
"""More of a worker's CPU than this in threads beside the one that makes batches is a row of its own."""
FEWEST_S = 0.02
"""Seconds that were clocked: of less nothing is said."""


def assembled(search: Search, seconds: float) -> TuningResult:
    """The result of a search after so many wall seconds."""
    run, data, warmup = search.run, search.run.workload.data, search.run.warmup
    undecided = why_undecided(search)
    best = choice_of(search, is_decided=undecided is None)
    ended = search.ended
    status: Status = "complete" if undecided is None else "undecided"
    if search.fastest() is None:
        ended, status, undecided = Ended.FALLBACK, "fallback", None
    elif ended is Ended.INTERRUPTED:
        status, undecided = "partial", None
    context, outcome = search.bursts.context, search.outcome
    won = outcome if outcome is not None and outcome.winner == best else None
    has_baseline = search.rounds is not None and search.rounds.baseline == run.baseline
    found = TuningResult(
        best=best,
        status=status,
        baseline=run.baseline,
        tuned_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        batch_size=best.batch_size or data.batch_size,
        shuffle=shuffles(run.workload),
        drop_last=data.drop_last,
        rate_unit="batches/s" if warmup.counts_batches else "samples/s",
        rate=_rate(search, best) if won is None else won.rate,
        baseline_rate=_rate(search, run.baseline),
        speedup=won.speedup if won is not None and has_baseline and best != run.baseline else None,
        ceiling=None if search.ceiling is None or best.batch_size else search.ceiling.samples_per_s,
        as_fast=() if won is None or undecided is not None else won.as_fast,
        undecided=undecided,
        ended=None if ended is None else ended(),
        step=warmup.step,
        stages=stage_times(pooled(each.measurement.stages for each in search.trials if each.measurement)),
        warnings=tuple(_cautions(search, best)),
        tolerance=run.tolerance,
        seconds=round(seconds, 3),
        step_s=context.step_s,
        step_cores=context.step_cores,
        machine=run.fingerprint,
        trials=tuple(search.trials),
        study=search.study,
    )
    measured = found.measurement_of(best)
    if measured is not None:
        found = replace(
            found,
            wait_share=measured.wait_share,
            memory_bytes=measured.taken_bytes,
            gpu_busy_share=measured.gpu_busy_share,
            source=source_of(measured, data, run.machine),
        )
    return judged(
        found,
        epoch_batches=data.batches_per_epoch(best.batch_size),
        on_accelerator=not run.workload.on_cpu,
        has_batched_fetch=data.has_batched_fetch,
    )


def stage_times(burst: StageSamples | None) -> tuple[StageTime, ...]:
    """Where a sample's time in a worker goes, the longest stage first; empty where too little was seen to say."""
    if burst is None or burst.samples <= 0 or math.fsum(row.wall_s for row in burst.seen) < FEWEST_S:
        return ()
    rows = [*burst.seen, Seen(HAND_OVER, "multiprocessing's queue", burst.queue_cpu_s, burst.queue_cpu_s)]
    others_s = burst.cpu_s - math.fsum(each.cpu_s for each in rows)
    if others_s > OTHERS_SHARE * burst.cpu_s:
        rows.append(Seen(OTHER_THREADS, "threads of the dataset or of its libraries", 0.0, others_s))
    all_wall_s, all_cpu_s = math.fsum(row.wall_s for row in rows), math.fsum(row.cpu_s for row in rows)
    stages: dict[str, list[Seen]] = {}
    for row in rows:
        stages.setdefault(row.stage, []).append(row)
    times = []
    for stage, own in stages.items():
        wall_s, cpu_s = math.fsum(row.wall_s for row in own), math.fsum(row.cpu_s for row in own)
        times.append(
            StageTime(
                stage=stage,
                where=max(own, key=lambda row: row.wall_s + row.cpu_s).where,
                wall_share=wall_s / all_wall_s if all_wall_s else 0.0,
                cpu_share=cpu_s / all_cpu_s if all_cpu_s else 0.0,
                wall_s=wall_s / burst.samples,
                cpu_s=cpu_s / burst.samples,
            )
        )
    return tuple(sorted(times, key=lambda each: (-each.wall_share, -each.cpu_share)))


def source_of(measured: Measurement, data: DataSide, machine: Machine) -> Finding | None:
    """Where bursts had their samples from, and where training will have them from; None where no kernel tells."""
    sample, samples = measured.read_bytes_per_sample, data.samples_per_epoch()
    if sample is None:
        return None
    if sample < FROM_MEMORY_BYTES:
        return Source.MEMORY()
    whole = None if samples is None else round(sample * samples)
    fits = None if whole is None else machine.holds(whole)
    row = Source.STORAGE if fits is None else Source.STORAGE_AT_FIRST if fits else Source.STORAGE_ALWAYS
    return row(sample=sample, data=whole, memory=machine.memory.total_bytes)


def why_undecided(search: Search) -> Finding | None:
    """Why the rounds do not decide, and what would; None where they do."""
    outcome, rounds = search.outcome, search.rounds
    if outcome is None or rounds is None:
        tried = {each.config.key() for each in search.trials if each.measurement is not None}
        return Undecided.ONE_TRIED() if len(tried) < 2 else Undecided.NO_ROUNDS()
    count = len(outcome.rounds)
    if rounds.ended is RoundsEnd.SAFE or outcome.at_ceiling or len({c for r in outcome.rounds for c in r.rates}) < 2:
        return None
    busy = _disturbed(search)
    if busy > MUCH_DISTURBED * count:
        return Undecided.BUSY(busy=busy, rounds=count)
    had_time = rounds.ended is RoundsEnd.NOT_WORTH_IT
    if count < FEW_ROUNDS and not had_time:
        return Undecided.FEW_ROUNDS(rounds=count)
    if search.twin.belief(search.study).loss(outcome.winner) > search.run.tolerance:
        why = Undecided.TOO_NOISY if had_time else Undecided.CLOSE
        return why(rounds=count, tolerance=search.run.tolerance)
    return None


def choice_of(search: Search, *, is_decided: bool) -> LoaderConfig:
    """What to use: the winner of the rounds; undecided the user's own, unless two rounds agree that the winner is faster.

    One round is enough where it is much faster, and the search did not show otherwise. Where no round could run, what is much
    faster in the bursts of the search is proposed.
    """
    outcome, baseline, fastest = search.outcome, search.run.baseline, search.fastest()
    if fastest is None:
        return LoaderConfig()
    measured = [each.config for each in search.trials if each.measurement is not None]
    believed = outcome.winner if outcome is not None else search.twin.belief(search.study).choice
    best = believed if believed in measured else fastest.config
    if is_decided or search.ended is Ended.INTERRUPTED or best == baseline or baseline not in measured:
        return best
    rounds = () if outcome is None else outcome.rounds
    gains = log_ratios(rounds, best, baseline)
    searched = [(each.config, each.samples_per_s or 0.0) for each in search.trials if each.round is None]
    own = max((rate for config, rate in searched if config == baseline), default=0.0)
    other = max((rate for config, rate in searched if config != baseline), default=0.0)
    was_so = not own or not other or other > MUCH_FASTER * own
    if not rounds:
        return best if own and other > MUCH_FASTER * own else baseline
    enough = 0.0 if len(gains) >= FEW_ROUNDS else math.log(MUCH_FASTER) if was_so else math.inf
    return best if min(gains, default=0.0) > enough else baseline


def _rate(search: Search, config: LoaderConfig) -> Interval | None:
    """Rate of a configuration: from the rounds, or else from its last burst."""
    outcome = search.outcome
    rates = [] if outcome is None else [each.rates[config] for each in outcome.rounds if config in each.rates]
    if len(rates) > 1:
        return mean_interval(rates)
    bursts = [each.measurement for each in search.trials if each.config.key() == config.key() and each.measurement]
    return bursts[-1].samples_per_s if bursts else None


def _disturbed(search: Search) -> int:
    """In how many rounds others kept the cores busy."""
    rounds = () if search.outcome is None else search.outcome.rounds
    return sum((each.foreign_cpu_share or 0.0) > FOREIGN_CPU_LIMIT for each in rounds)


# What has to be known


def _cautions(search: Search, best: LoaderConfig) -> Iterator[Finding]:
    yield from _of_training(best, search.run.workload.data)
    yield from (Caution.NOTE(text=each) for each in search.run.notes)
    if (busy := _disturbed(search)) and search.outcome is not None:
        yield Caution.DISTURBED(limit=FOREIGN_CPU_LIMIT, busy=busy, rounds=len(search.outcome.rounds))
    kinds: dict[str, list[str]] = {}
    for trial in search.trials:
        if trial.failure is not None:
            kinds.setdefault(trial.failure.kind, []).append(trial.failure.message)
    for kind, messages in sorted(kinds.items()):
        yield Caution.FAILED(trials=len(messages), kind=kind, message=messages[0])


def _of_training(best: LoaderConfig, data: DataSide) -> Iterator[Finding]:
    """What a configuration changes in training."""
    if best.batch_size is not None and data.batch_size:
        yield Caution.BATCH_SIZE(old=data.batch_size, new=best.batch_size)
    if not best.in_order:
        yield Caution.OUT_OF_ORDER()
    if best.persistent_workers and data.has_epochs:
        yield Caution.EPOCH_NOT_SEEN()
    if data.is_iterable and data.drop_last and best.num_workers > 1:
        yield Caution.FEWER_SAMPLES(workers=best.num_workers)


# What comes with a result


def loader_parts(workload: Workload) -> dict[str, Any]:
    """What a loader made from the result takes over from the tuned one."""
    data = workload.data
    parts = {"collate_fn": data.collate_fn, "worker_init_fn": data.worker_init_fn, "generator": data.generator}
    if data.has_own_order:
        order = "sampler" if data.batch_sampler is None else "batch_sampler"
        parts |= {order: getattr(data, order), "dataset": data.dataset}
    return {name: value for name, value in parts.items() if value is not None}


def shuffles(workload: Workload) -> bool | None:
    """Whether the user's loader shuffles; None for an order of its own, or that of a stream.

    A dataset alone says nothing of it: bursts shuffle, as training does, and a loader made of it has DataLoader's default.
    """
    data = workload.data
    if data.is_iterable or data.has_own_order:
        return None
    return workload.own_config is not None and data.is_shuffled


def saved(result: TuningResult, output: str | None) -> TuningResult:
    """The result, written where that was asked for. A disk that is full by now costs a warning, not the result."""
    if output is None:
        return result
    try:
        result.save(output)
    except OSError as error:
        told = Caution.NOT_WRITTEN(path=output, why=error.strerror or type(error).__name__)
        log.warning("%s", told.sentence)
        return replace(result, warnings=(*result.warnings, told))
    return result
