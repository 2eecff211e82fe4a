"""From a search to its `TuningResult`: what is chosen, whose figures it holds, and what has to be known before it is used.

What limits the rate, and what to do about it, is said by `diagnosis`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from statistics import fmean
from typing import Any

from autotune_loader.diagnosis import Caution, Ended, Source, Undecided, judged
from autotune_loader.diagnosis.evidence import FOREIGN_CPU_LIMIT
from autotune_loader.machine.facts import Machine
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.results.record import Finding, Status
from autotune_loader.results.result import TuningResult
from autotune_loader.search.belief import CERTAIN, Belief, equally_fast
from autotune_loader.search.turns import LEAST_ROUNDS
from autotune_loader.tuning.study import Search
from autotune_loader.values import (
    HAND_OVER,
    OTHER_THREADS,
    Effects,
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
    run, data, warmup, belief = search.run, search.run.workload.data, search.run.warmup, search.belief
    undecided = why_undecided(search)
    best = choice_of(search, is_decided=undecided is None)
    ended = search.ended
    status: Status = "complete" if undecided is None else "undecided"
    if search.fastest() is None:
        ended, status, undecided = Ended.FALLBACK, "fallback", None
    elif ended is Ended.INTERRUPTED:
        status, undecided = "partial", None
    context, rounds = search.bursts.context, [each for each in belief.rounds if each.rates]
    effects = Effects(rounds) if any(best in each.rates for each in rounds) else None
    speedup = effects.ratio(best, run.baseline) if effects and best != run.baseline in effects.keys else None
    found = TuningResult(
        best=best,
        status=status,
        baseline=run.baseline,
        tuned_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        batch_size=best.batch_size or data.batch_size,
        shuffle=shuffles(run.workload),
        drop_last=data.drop_last,
        rate_unit="batches/s" if warmup.counts_batches else "samples/s",
        rate=_rate(search, best)
        if effects is None
        else effects.rate(best, chosen_of=_contenders(effects, best, run.tolerance)),
        baseline_rate=_rate(search, run.baseline),
        speedup=speedup if speedup is not None and speedup.count else None,
        ceiling=None if search.ceiling is None or best.batch_size else search.ceiling.samples_per_s,
        as_fast=() if effects is None or undecided is not None else _as_fast(belief, effects, best),
        undecided=undecided,
        ended=None
        if ended is None
        else ended(tolerance=run.tolerance, which="" if search.twin.is_open else " that ran"),
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


def _contenders(effects: Effects, best: LoaderConfig, tolerance: float) -> int:
    """How many might have been chosen by these rounds: those that are not shown to be slower by more than the tolerance."""
    return sum(each == best or effects.ratio(each, best).high >= 1 - tolerance for each in effects.keys)


def _as_fast(belief: Belief, effects: Effects, best: LoaderConfig) -> tuple[LoaderConfig, ...]:
    """Who counts as equally fast of those that ran in rounds, by the rule that made the choice; none of them is cheaper."""
    ran = [each for each in effects.keys if each.key() in belief.configs]
    equal = [ran[index] for index in equally_fast(belief.draws.of([each.key() for each in ran]), belief.tolerance)]
    cost = belief.space.cost
    return tuple(each for each in equal if each != best and cost(each) >= cost(best))


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
    """Why the bursts do not decide, and what would; None where they do."""
    belief, ended, rounds = search.belief, search.ended, search.belief.rounds
    tried = {each.config.key() for each in search.trials if each.measurement is not None}
    if ended in (Ended.SAFE, Ended.CEILING) or not tried:
        return None
    if not rounds:
        return Undecided.ONE_TRIED() if len(tried) < 2 else Undecided.NO_ROUNDS()
    busy = _disturbed(search)
    if busy > MUCH_DISTURBED * len(rounds):
        return Undecided.BUSY(busy=busy, rounds=len(rounds))
    had_time = ended is Ended.NOT_WORTH_IT
    if len(rounds) < LEAST_ROUNDS and not had_time:
        return Undecided.FEW_ROUNDS(rounds=len(rounds))
    if belief.loss(_measured_choice(belief)) > search.run.tolerance:
        why = Undecided.TOO_NOISY if had_time else Undecided.CLOSE
        return why(rounds=len(rounds), tolerance=search.run.tolerance)
    return None


def choice_of(search: Search, *, is_decided: bool) -> LoaderConfig:
    """What to use: undecided the user's own, unless something that ran is almost certainly faster."""
    belief, baseline = search.belief, search.run.baseline
    if search.fastest() is None:
        return LoaderConfig()
    best = _measured_choice(belief)
    measured = {each.config for each in search.trials if each.measurement is not None}
    if is_decided or search.ended is Ended.INTERRUPTED or best == baseline or baseline not in measured:
        return best
    return best if belief.is_faster(best, baseline) >= CERTAIN else baseline


def _measured_choice(belief: Belief) -> LoaderConfig:
    """The cheapest of those that count as equally fast, of those that ran in two rounds, or else in any burst.

    None is chosen over a cheaper one that was faster by more than the tolerance in the rounds of both: a choice that the table
    of rounds contradicts would be believed by nobody.
    """
    ran: Counter[LoaderConfig] = Counter(
        config for each in belief.rounds for config in each.rates if config.key() in belief.configs
    )
    in_bursts = [each.config for each in belief.trials if each.samples_per_s and each.config.key() in belief.configs]
    often = [config for config, count in ran.items() if count >= LEAST_ROUNDS]
    among: list[LoaderConfig] = list(dict.fromkeys(often or in_bursts))
    best, cost = belief.choice_of(among), belief.space.cost
    for each in sorted(often, key=cost):
        logs = log_ratios(belief.rounds, each, best)
        agree = len(logs) > LEAST_ROUNDS or min(logs, default=0.0) > 0
        if cost(each) < cost(best) and agree and fmean(logs) > math.log1p(belief.tolerance):
            return each
    return best


def _rate(search: Search, config: LoaderConfig) -> Interval | None:
    """Rate of a configuration: from the rounds, or else from its last burst."""
    rates = [each.rates[config] for each in search.belief.rounds if config in each.rates]
    if len(rates) > 1:
        return mean_interval(rates)
    bursts = [each.measurement for each in search.trials if each.config.key() == config.key() and each.measurement]
    return bursts[-1].samples_per_s if bursts else None


def _disturbed(search: Search) -> int:
    """In how many rounds others kept the cores busy."""
    return sum((each.foreign_cpu_share or 0.0) > FOREIGN_CPU_LIMIT for each in search.belief.rounds)


# What has to be known


def _cautions(search: Search, best: LoaderConfig) -> Iterator[Finding]:
    yield from _of_training(best, search.run.workload.data)
    if search.fastest() is not None and _starts_count(search.belief):
        yield Caution.EPOCH_STARTS()
    yield from (Caution.NOTE(text=each) for each in search.run.notes)
    if busy := _disturbed(search):
        yield Caution.DISTURBED(limit=FOREIGN_CPU_LIMIT, busy=busy, rounds=len(search.belief.rounds))
    kinds: dict[str, list[str]] = {}
    for trial in search.trials:
        if trial.failure is not None:
            kinds.setdefault(trial.failure.kind, []).append(trial.failure.message)
    for kind, messages in sorted(kinds.items()):
        yield Caution.FAILED(trials=len(messages), kind=kind, message=messages[0])


def _starts_count(belief: Belief) -> bool:
    """Whether workers of anything that ran start for more than the tolerance of an epoch."""
    tried = {trial.config.key() for trial in belief.trials if trial.samples_per_s}
    logs = (belief.sustained.paths - belief.draws.paths).mean(axis=0)
    return any(log > belief.tolerance for config, log in zip(belief.configs, logs, strict=True) if config in tried)


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
