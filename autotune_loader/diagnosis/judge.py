"""From figures to findings: what limits a loader, what to do about it, and both put into a result.

`tune()`, `compare()`, AutoLoader and `watch` use the same rules. docs/bottleneck.md has them in order: the first row of `_row`
that holds is the answer. Each rests on a clock or a count; where two of them disagree, or nothing shows it, the answer is
UNCLEAR, with both figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from autotune_loader.diagnosis.evidence import FOREIGN_CPU_LIMIT, NEGLIGIBLE, Evidence
from autotune_loader.diagnosis.messages import Advice, Bottleneck, Caution, Fact, Source
from autotune_loader.results.result import Finding, TuningResult
from autotune_loader.values import BURSTS_DIFFER, LoaderConfig, Measurement
from autotune_loader.values.trace import OTHER_THREADS, TRANSFER

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Machine
    from autotune_loader.pipeline.forking import ParentProcess
    from autotune_loader.pipeline.workload import DataSide

Result = TypeVar("Result", bound=TuningResult)

FEWEST_BATCHES = 3
"""Fewer say nothing: the first waits for the workers to start, and the last has no step after it."""
LITTLE_GAIN, LARGE_GAIN = 0.02, 9.0
"""A smaller gain is not worth a sentence (it is the tolerance of `tune()`); a larger one only says how short the step is."""
LONG_START = 0.1
"""Share of the time in the starts of epochs from which on they count."""
COMPUTING_SHARE = 0.6
"""A fetch that has the CPU for more than this share of its time computes; below, it waits for storage or the network."""
TRANSFER_SHARE = 0.3
"""Share of the loop's time in receiving batches from which on that is the bottleneck."""
COPY_SHARE = 0.5
"""Copies are the bottleneck where they are more than this share of what a batch takes beyond its step."""
MUCH_SLOWER = 0.8
"""A step below this share of its rate alone is held up by something other than waiting for data."""
RARELY_FETCHES = 0.2
"""The loop does not wait for workers that fetch for less than this share of their time."""
IDLE_SHARE = 0.15
"""With more than this share of the cores idle, a fetch that waits does not wait for a core."""
LARGE_STAGE = 0.2
"""A stage that takes more than this share of a worker is worth naming."""
LARGE_BATCH_BYTES = 1 << 20
"""Below this size the fixed cost of a transfer counts, not the bytes."""
CHEAP_BATCH_S, CHEAP_SAMPLE_S = 0.002, 50e-6
"""A batch that is loaded faster than this costs less than its transfer from a worker."""
PYTHON_SAMPLE_S = 200e-6
"""A sample that is loaded faster than this is mostly Python's overhead per sample, which a batched fetch saves."""
FROM_MEMORY_BYTES = 64
"""Fewer bytes read per sample are those of the code that the first batch imports."""
LARGE_PARENT_BYTES = 4 << 30
"""From this size on forks are expensive: each copies 8 MiB of page tables in 60 to 70 ms of the training's CPU, and to
write 1 GiB again takes 2 to 3 s of it in place of 0.1 s (2 cores of an AMD EPYC, pages of 4 KiB)."""
CHEAPER = {  # stages of libraries: what the user's own function of that name does is not known
    "decode": ": smaller source images, a faster decoder, or a cache of decoded images",
    "read": ": larger chunks, or a format that needs no parsing",
    "collate": ": fewer and larger tensors",
}


def diagnose(evidence: Evidence) -> tuple[Finding, tuple[Finding, ...]]:
    """What limits a loader, with the most that instant data would gain, and what to do about it, the best first."""
    if ceiling_doubt(evidence) is not None:
        evidence = replace(evidence, ceiling=None)
    row = _row(evidence)
    return _bottleneck(row, evidence), tuple(_advice(row, evidence))


def judged(
    result: Result, *, epoch_batches: int | None = None, parent: ParentProcess | None = None, **known: bool
) -> Result:
    """The result with bottleneck and advice; without a ceiling that was passed: a warning, where it is that of the step.

    Args:
        result: figures and trials; its `machine` tells the cores.
        epoch_batches: batches of an epoch, where that is known.
        parent: what workers were forked from, if they were.
        **known: `on_accelerator` and `has_batched_fetch` of the evidence.
    """
    measurement, rate, machine = result.measurement_of(result.best), result.rate, result.machine
    if measurement is None or rate is None or machine is None:
        return replace(result, bottleneck=Bottleneck.NOTHING(), advice=tuple(_start_method(result.best, parent)))
    transfer = result.transfer_ceiling
    if transfer is not None and rate.value > (1 + BURSTS_DIFFER) * transfer.value:
        transfer = None
    alike = {name: getattr(result, name) for name in ("rate_unit", "wait_share", "ceiling", "stages", "trials")}
    evidence = Evidence.of(
        measurement,
        config=result.best,
        cores=machine.usable_cores,
        epoch_batches=epoch_batches,
        samples_per_s=rate.value,
        transfer_ceiling=transfer,
        parent=parent,
        **alike,
        **known,
    )
    bottleneck, advice = diagnose(evidence)
    ceiling, gain = result.ceiling, bottleneck.gain
    if (doubt := ceiling_doubt(evidence)) is not None:
        result, ceiling = replace(result, warnings=(*result.warnings, doubt)), None
    elif ceiling is not None and not evidence.on_accelerator and gain is not None:
        ceiling = rate.scaled(1 + gain)
    return replace(result, ceiling=ceiling, transfer_ceiling=transfer, bottleneck=bottleneck, advice=advice)


def ceiling_doubt(evidence: Evidence) -> Finding | None:
    """Why the ceiling is wrong: a rate lies above it, or steps in the loop are faster than alone."""
    if evidence.ceiling is None:
        return None
    alone, wait = evidence.ceiling.value, evidence.wait_share or 0.0
    # A loop that hardly steps says nothing about its step.
    in_loop = evidence.samples_per_s / (1 - wait) if wait <= 1 - NEGLIGIBLE else evidence.samples_per_s
    fastest = max([in_loop, *evidence.rates])
    if fastest <= (1 + BURSTS_DIFFER) * alone:
        return None
    return Caution.CEILING_PASSED(alone=alone, rate=fastest, unit=evidence.rate_unit)


# What limits it


def _row(evidence: Evidence) -> Bottleneck:
    wait, config, handed = evidence.wait_share, evidence.config, evidence.handed_over
    if evidence.batches is not None and evidence.batches < FEWEST_BATCHES:
        return Bottleneck.TOO_SHORT
    if wait is None:
        return Bottleneck.NO_STEP
    if evidence.loader_share < LITTLE_GAIN and wait >= NEGLIGIBLE:
        return Bottleneck.LITTLE
    if evidence.starting_share > (LONG_START if evidence.fetch_s is None else max(LONG_START, wait / 2)):
        return Bottleneck.START_UP
    if evidence.reaches(evidence.ceiling):
        return Bottleneck.STEP
    if evidence.saved_s > max(COPY_SHARE * (evidence.period_s - evidence.alone_s), LITTLE_GAIN * evidence.period_s):
        return Bottleneck.COPY
    if config.num_workers and handed is not None and evidence.reaches(handed):
        beyond_s = evidence.batch_size / handed.value - evidence.alone_s
        return Bottleneck.COPY if (evidence.copy_s or 0.0) > COPY_SHARE * beyond_s else Bottleneck.TRANSFER
    if wait < NEGLIGIBLE:
        return _never_waiting(evidence)
    if evidence.ran_out is not None:
        return Bottleneck.MEMORY
    if evidence.fetch_s is None:
        return Bottleneck.UNCLEAR
    if not config.num_workers and evidence.fetch_s < max(CHEAP_BATCH_S, CHEAP_SAMPLE_S * evidence.batch_size):
        return Bottleneck.IN_MEMORY
    if evidence.waiting is not None and evidence.waiting[1] > max(evidence.waiting[::2]):
        return Bottleneck.CORES
    if config.num_workers and (evidence.receive_s or 0.0) > TRANSFER_SHARE * evidence.period_s:
        return Bottleneck.TRANSFER
    return _cpu_or_storage(evidence)


def _never_waiting(evidence: Evidence) -> Bottleneck:
    """What slows a step that has its batches in time: nothing, or workers that share its cores."""
    if evidence.ceiling is None:
        return Bottleneck.STEP
    # With half of the cores idle, workers take none from it.
    if evidence.on_accelerator or (evidence.cpu_share is not None and evidence.cpu_share < 0.5):
        is_as_alone = evidence.samples_per_s >= MUCH_SLOWER * evidence.ceiling.value
        return Bottleneck.STEP if is_as_alone else Bottleneck.UNCLEAR
    return Bottleneck.UNCLEAR if evidence.foreign_share > FOREIGN_CPU_LIMIT else Bottleneck.CPU


def _cpu_or_storage(evidence: Evidence) -> Bottleneck:
    fetch, is_full = evidence.undisturbed, (evidence.cpu_share or 0.0) > 1 - IDLE_SHARE
    if not is_full and evidence.fetching_share < RARELY_FETCHES:
        return Bottleneck.UNCLEAR
    if is_full or fetch.computing_share > COMPUTING_SHARE:
        return Bottleneck.CPU
    if evidence.waiting is not None and evidence.waiting[0] == max(evidence.waiting):
        return Bottleneck.TRANSFER if evidence.config.num_workers else Bottleneck.CPU
    # A fetch does not wait for a core where cores were idle, or where it waits longer than others used them.
    others = fetch.foreign_cpu_share
    had_core = fetch.cpu_share is None or others is None or 1 - fetch.cpu_share - others > IDLE_SHARE
    waits_longer = fetch.computing_share <= COMPUTING_SHARE * (1 - fetch.foreign_share)
    return Bottleneck.STORAGE if had_core or waits_longer else Bottleneck.UNCLEAR


def _bottleneck(row: Bottleneck, evidence: Evidence) -> Finding:
    share = evidence.loader_share if row is Bottleneck.LITTLE else evidence.starting_share
    found = row(share=share, fetch=evidence.fetch_s, batches=evidence.batches or 0)
    if row in (Bottleneck.TOO_SHORT, Bottleneck.NO_STEP):
        return found
    facts = filter(None, _facts(row, evidence))
    return Finding(kind=found.kind, sentence=" ".join([found, *facts]), gain=evidence.headroom)


def _facts(row: Bottleneck, evidence: Evidence) -> Iterator[Finding | None]:
    """The figures behind it, a sentence each."""
    fetch, trial, foreign = evidence.undisturbed, evidence.ran_out, evidence.foreign_share
    ceiling, handed = evidence.ceiling, evidence.handed_over
    match row:
        case Bottleneck.CPU:
            yield Fact.CPU_OF_BATCH(cpu=evidence.fetch_cpu_s, step=evidence.step_s)
            if evidence.cpu_share is not None:
                yield Fact.CORES(share=min(1.0, evidence.cpu_share), cores=round(evidence.cores))
        case Bottleneck.STORAGE:
            yield Fact.WAITED(fetch=fetch.fetch_s, cpu=fetch.fetch_cpu_s)
            yield _stage_that_waits(evidence)
        case Bottleneck.CORES if evidence.waiting is not None:
            yield Fact.FOR_A_CORE(share=evidence.waiting[1])
        case Bottleneck.TRANSFER if handed is not None and evidence.reaches(handed):
            yield Fact.HANDED_OVER(handed=evidence.batch_size / handed.value, alone=evidence.alone_s)
            yield None if evidence.pin_s is None else Fact.PINNING(pin=evidence.pin_s)
        case Bottleneck.TRANSFER:
            receiving = Fact.RECEIVING if evidence.batch_bytes else Fact.RECEIVING_ONE
            yield receiving(size=evidence.batch_bytes, receive=evidence.receive_s)
        case Bottleneck.COPY:
            yield Fact.COPYING(size=evidence.batch_bytes, copy=evidence.copy_s)
        case Bottleneck.MEMORY if trial is not None and trial.failure is not None:
            yield Fact.RAN_OUT(config=trial.config, kind=trial.failure.kind.replace("_", " "))
        case Bottleneck.UNCLEAR:
            if evidence.fetch_s is not None and (evidence.wait_share or 0.0) >= NEGLIGIBLE:
                yield Fact.WAITED(fetch=fetch.fetch_s, cpu=fetch.fetch_cpu_s)
                yield Fact.FETCHES(share=evidence.fetching_share)
            yield Fact.BUSY(share=foreign) if foreign > NEGLIGIBLE else None
        case Bottleneck.LITTLE:
            return
    yield Fact.WAITS(wait=evidence.wait_share)
    if row in (Bottleneck.STEP, Bottleneck.UNCLEAR):
        if ceiling is not None:
            yield Fact.OF_CEILING(rate=evidence.samples_per_s, ceiling=ceiling.value, unit=evidence.rate_unit)
    elif row is not Bottleneck.START_UP:
        yield from _gain(evidence)
        factor = 0.0 if handed is None else handed.value / evidence.samples_per_s
        if row not in (Bottleneck.TRANSFER, Bottleneck.COPY) and factor > 1 + NEGLIGIBLE:
            yield Fact.WORKERS_AT_MOST(factor=factor)


def _gain(evidence: Evidence) -> Iterator[Finding]:
    """What instant data would bring, and where a longer step is part of it."""
    gain, foreign = evidence.headroom or 0.0, evidence.foreign_share
    if (evidence.step_s or 0.0) - (evidence.copy_s or 0.0) > evidence.alone_s / MUCH_SLOWER:
        shared = {"step": evidence.step_s, "alone": evidence.alone_s}
        yield Fact.BUSY(share=foreign) if foreign > FOREIGN_CPU_LIMIT else Fact.SHARED_CORES(**shared)
    if gain >= LARGE_GAIN:
        yield Fact.MUCH()
    elif evidence.ceiling is not None and evidence.on_accelerator and gain >= LITTLE_GAIN:
        yield Fact.AT_MOST(factor=1 + gain)
    elif not evidence.on_accelerator and gain >= NEGLIGIBLE:  # steps may be shorter without a wait
        yield Fact.ABOUT(factor=1 + gain)


def _stage_that_waits(evidence: Evidence) -> Finding | None:
    """The stage with the largest part of a worker's waiting, and its line."""
    longest = max(evidence.stages, key=lambda each: each.waited_s, default=None)
    whole_s = sum(each.waited_s for each in evidence.stages)
    if longest is None or not whole_s or longest.waited_s < LARGE_STAGE * whole_s:
        return None
    return Fact.STAGE_WAITS(stage=longest.stage, share=longest.waited_s / whole_s, where=longest.where)


# What to do about it


def _advice(row: Bottleneck, evidence: Evidence) -> Iterator[Finding]:
    """One to three sentences for each bottleneck, with the figures that call for them."""
    config = evidence.config
    match row:
        case Bottleneck.STEP:
            yield Advice.SPEED_UP_STEP()
        case Bottleneck.LITTLE:
            yield Advice.LEAVE_IT()
        case Bottleneck.NO_STEP:
            yield Advice.KEEP_ITERATOR()
        case Bottleneck.CPU:
            yield from _cheaper_fetching(evidence)
            yield from _batched_fetch(evidence)
        case Bottleneck.IN_MEMORY:
            yield from [*_batched_fetch(evidence)] or [Advice.LEAVE_IT()]
        case Bottleneck.STORAGE:
            yield Advice.LARGER_READS()
        case Bottleneck.CORES:
            many = config.num_workers > 1
            yield Advice.FEWER_WORKERS(workers=config.num_workers) if many else Advice.MORE_CORES()
        case Bottleneck.TRANSFER:
            is_large = evidence.batch_bytes >= LARGE_BATCH_BYTES
            yield Advice.TRANSFER_LESS(size=evidence.batch_bytes) if is_large else Advice.LARGER_BATCHES()
            yield Advice.AUTOLOADER_TRANSFERS(workers=config.num_workers)
        case Bottleneck.COPY:
            if not config.device_prefetch:
                yield Advice.COPY_AHEAD()
            if evidence.batch_bytes >= LARGE_BATCH_BYTES:
                yield Advice.TRANSFER_LESS(size=evidence.batch_bytes)
        case Bottleneck.MEMORY:
            trial = evidence.ran_out
            is_shared = trial and trial.failure and trial.failure.kind == "shared_memory"
            yield Advice.MORE_SHARED_MEMORY() if is_shared else Advice.SMALLER_WORKERS()
    if evidence.starting_share > LONG_START and config.num_workers and not config.persistent_workers:
        yield Advice.KEEP_WORKERS()
    yield from _start_method(config, evidence.parent)


def _start_method(config: LoaderConfig, parent: ParentProcess | None) -> Iterator[Finding]:
    """Why workers should not be forked from this process, and what to do."""
    if parent is None or not config.num_workers:
        return
    if parent.accelerator is not None:
        why = Fact.FORKED_INITIALIZED(accelerator=parent.accelerator.upper())
    elif parent.own_bytes >= LARGE_PARENT_BYTES:
        why = Fact.FORKED_LARGE(memory=parent.own_bytes)
    else:
        return
    row = Advice.FORKSERVER if parent.is_elastic else Advice.FORKSERVER_BY_AUTOLOADER
    yield Finding(kind=row.kind, sentence=f"{why} {row()}")


def _cheaper_fetching(evidence: Evidence) -> Iterator[Finding]:
    """The stages that take much of a worker's CPU, the largest first; the transforms as a whole where none is known."""
    named = [each for each in evidence.stages if each.stage not in (TRANSFER, OTHER_THREADS)]  # lines of the user's
    large = [each for each in named if each.cpu_share >= LARGE_STAGE]
    for each in sorted(large, key=lambda stage: -stage.cpu_share):
        how = CHEAPER.get(each.stage, "") if each.is_library else ""
        yield Advice.CHEAPER_STAGE(stage=each.stage, where=each.where, how=how, share=each.cpu_share, cpu=each.cpu_s)
    if not large and evidence.fetch_cpu_s:
        yield Advice.CHEAPER_TRANSFORMS(cpu=evidence.fetch_cpu_s / evidence.batch_size)


def _batched_fetch(evidence: Evidence) -> Iterator[Finding]:
    sample_s = (evidence.fetch_s or 0.0) / evidence.batch_size
    is_python = 0 < sample_s <= PYTHON_SAMPLE_S and evidence.undisturbed.computing_share >= 0.5
    if is_python and not evidence.has_batched_fetch:
        yield Advice.BATCHED_FETCH(sample=sample_s)


# What else has to be known of a tuned configuration


def source_of(measured: Measurement, data: DataSide, machine: Machine) -> Finding | None:
    """Where bursts had their samples from, and where training will have them from; None where the kernel does not tell."""
    sample, samples = measured.read_bytes_per_sample, data.samples_per_epoch()
    if sample is None:
        return None
    if sample < FROM_MEMORY_BYTES:
        return Source.NOT_STORAGE()
    whole = None if samples is None else round(sample * samples)
    fits = None if whole is None else machine.holds(whole)
    row = Source.STORAGE if fits is None else Source.STORAGE_AT_FIRST if fits else Source.STORAGE_ALWAYS
    return row(sample=sample, data=whole, memory=machine.memory.total_bytes)


def changes_in_training(best: LoaderConfig, data: DataSide) -> Iterator[Finding]:
    """What a configuration changes beside the rate."""
    if best.batch_size is not None and data.batch_size:
        yield Caution.BATCH_SIZE(old=data.batch_size, new=best.batch_size)
    if not best.in_order:
        yield Caution.OUT_OF_ORDER()
    if best.persistent_workers and data.has_epochs:
        yield Caution.EPOCH_NOT_SEEN()
    if data.is_iterable and data.drop_last and best.num_workers > 1:
        yield Caution.FEWER_SAMPLES(workers=best.num_workers)
