"""From figures to findings, written once for `tune()`, `compare()`, AutoLoader and `watch`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune_loader.diagnosis.bottleneck import LARGE_BATCH_BYTES, LARGE_STAGE, LONG_START, bottleneck_of
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.tables import Advice, Bottleneck, Caution, Source
from autotune_loader.results.record import Finding
from autotune_loader.results.result import TuningResult
from autotune_loader.values import OTHER_THREADS, TRANSFER, LoaderConfig, Measurement

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Machine
    from autotune_loader.pipeline.workload import DataSide

BURSTS_DIFFER = 0.15
"""A burst and the step alone may differ by so much, and nothing is wrong."""
HARDLY_STEPS = 0.95
"""A loop that waits for more than this tells nothing of its step."""
PYTHON_SAMPLE_S = 200e-6
"""Fetching a sample faster than this is mostly Python's overhead per sample, which a batched fetch saves."""
CHEAPER = {
    "decode": ": smaller source images, a faster decoder, or a cache of decoded images",
    "read": ": larger chunks, or a format that needs no parsing",
    "collate": ": fewer and larger tensors",
}
NO_LINES = (TRANSFER, OTHER_THREADS)
"""Stages that are no lines of the user's."""
FROM_MEMORY_BYTES = 64
"""Less than this for each sample is what reading the code of the first batch takes."""


def diagnose(evidence: Evidence) -> tuple[Finding, tuple[Finding, ...]]:
    """What limits a loader, and what to do about it, the best first, from what was measured of it alone."""
    if ceiling_doubt(evidence) is not None:
        evidence = replace(evidence, ceiling=None)
    bottleneck = bottleneck_of(evidence)
    return bottleneck, tuple(_advice(evidence, bottleneck))


def judged(result: TuningResult, *, epoch_batches: int | None = None, **known: bool) -> TuningResult:
    """The result with bottleneck and advice; without a ceiling where something speaks against it, which is a warning then.

    Args:
        result: figures and trials; its `machine` tells the cores.
        epoch_batches: batches of an epoch, where that is known.
        **known: `on_accelerator` and `has_batched_fetch` of the evidence.
    """
    measurement, machine = result.measurement_of(result.best), result.machine
    if measurement is None or result.rate is None or machine is None:
        return replace(result, bottleneck=Bottleneck.NOTHING(), advice=())
    evidence = Evidence.of(
        measurement,
        config=result.best,
        cores=machine.usable_cores,
        epoch_batches=epoch_batches,
        samples_per_s=result.rate.value,
        wait_share=result.wait_share,
        ceiling=result.ceiling,
        stages=result.stages,
        trials=result.trials,
        **known,
    )
    bottleneck, advice = diagnose(evidence)
    if (doubt := ceiling_doubt(evidence)) is not None:
        result = replace(result, ceiling=None, warnings=(*result.warnings, doubt))
    return replace(result, bottleneck=bottleneck, advice=advice)


def _advice(evidence: Evidence, bottleneck: Finding) -> Iterator[Finding]:
    """One to three sentences for each bottleneck, with the figures that call for them."""
    config = evidence.config
    match Bottleneck[bottleneck.kind.upper()]:
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
            yield from _batched_fetch(evidence)
            yield Advice.AUTOLOADER_TRANSFERS(workers=2)
        case Bottleneck.STORAGE:
            yield Advice.LARGER_READS()
        case Bottleneck.CORES:
            many = config.num_workers > 1
            yield Advice.FEWER_WORKERS(workers=config.num_workers) if many else Advice.MORE_CORES()
        case Bottleneck.TRANSFER:
            is_large = evidence.batch_bytes >= LARGE_BATCH_BYTES
            row = Advice.TRANSFER_LESS if is_large else Advice.LARGER_BATCHES
            yield row(size=evidence.batch_bytes, receive=evidence.receive_s)
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


def _cheaper_fetching(evidence: Evidence) -> Iterator[Finding]:
    """The stages that take much of a worker's CPU, the largest first; the transforms as a whole where none is known."""
    large = [each for each in evidence.stages if each.cpu_share >= LARGE_STAGE and each.stage not in NO_LINES]
    for each in sorted(large, key=lambda stage: -stage.cpu_share):
        how = CHEAPER.get(each.stage, "")
        yield Advice.CHEAPER_STAGE(stage=each.stage, where=each.where, how=how, share=each.cpu_share, cpu=each.cpu_s)
    if not large and evidence.fetch_cpu_s:
        yield Advice.CHEAPER_TRANSFORMS(cpu=evidence.fetch_cpu_s / evidence.batch_size)


def _batched_fetch(evidence: Evidence) -> Iterator[Finding]:
    sample_s = (evidence.fetch_s or 0.0) / evidence.batch_size
    is_python = 0 < sample_s <= PYTHON_SAMPLE_S and evidence.undisturbed.computing_share >= 0.5
    if is_python and not evidence.has_batched_fetch:
        yield Advice.BATCHED_FETCH(sample=sample_s)


def ceiling_doubt(evidence: Evidence) -> Finding | None:
    """Why the ceiling is none: no rate may lie above it, and no step be faster in the loop than alone."""
    if evidence.ceiling is None:
        return None
    alone, wait = evidence.ceiling.value, evidence.wait_share or 0.0
    in_loop = evidence.samples_per_s / (1 - wait) if wait <= HARDLY_STEPS else evidence.samples_per_s
    fastest = max([in_loop, *evidence.rates])
    return Caution.CEILING_PASSED(alone=alone, rate=fastest) if fastest > (1 + BURSTS_DIFFER) * alone else None


def source_of(measured: Measurement, data: DataSide, machine: Machine) -> Finding | None:
    """Where bursts had their samples from, and where training will have them from; None where no kernel tells."""
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
