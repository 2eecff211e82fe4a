"""From figures to findings, written once for `tune()`, `compare()`, AutoLoader and `watch`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune_loader.diagnosis.advice import advise
from autotune_loader.diagnosis.bottleneck import bottleneck_of
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.ranking import BURSTS_DIFFER, ceiling_doubt
from autotune_loader.diagnosis.tables import Bottleneck, Source
from autotune_loader.results.record import Finding, Job
from autotune_loader.results.result import TuningResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What limits a loader, and what to do about it."""

    bottleneck: Finding
    """Its `gain` is what a loader without any cost would bring at most."""
    advice: tuple[Finding, ...]


def diagnose(evidence: Evidence) -> Diagnosis:
    """What limits a loader, and what to do about it, from what was measured of it alone."""
    ceiling = evidence.ceiling
    if ceiling is not None and evidence.samples_per_s > (1 + BURSTS_DIFFER) * ceiling.value:
        evidence = replace(evidence, ceiling=None)  # a rate above it: it is none
    bottleneck = bottleneck_of(evidence)
    return Diagnosis(bottleneck=bottleneck, advice=advise(evidence, bottleneck))


def judged(result: TuningResult, *, has_batched_fetch: bool = True, max_workers: int | None = None) -> TuningResult:
    """The result with bottleneck and advice; without a ceiling where something speaks against it, which is a warning then.

    Args:
        result: figures and trials; its `job` tells the cores.
        has_batched_fetch: whether the dataset can fetch batches, or that cannot be told.
        max_workers: the most workers that could be tried, where somebody said so.
    """
    doubt = ceiling_doubt(result)
    if doubt is not None:
        result = replace(result, ceiling=None, warnings=(*result.warnings, doubt))
    measurement, job = result.measurement_of(result.best), result.job
    if measurement is None or result.rate is None or job is None:
        return replace(result, bottleneck=Bottleneck.NOTHING(), advice=())
    known = Evidence.of(
        measurement,
        config=result.best,
        cores=job.usable_cores,
        samples_per_s=result.rate.value,
        wait_share=result.wait_share,
        ceiling=result.ceiling,
        epoch_batches=job.epoch_batches,
        on_accelerator=job.on_accelerator,
        has_batched_fetch=has_batched_fetch,
        max_workers=max_workers,
        stages=result.stages,
        trials=result.trials,
    )
    found = diagnose(known)
    return replace(result, bottleneck=found.bottleneck, advice=found.advice)


def source_of(job: Job | None, memory_bytes: int | None) -> Finding | None:
    """Where bursts had their samples from, and where training will have them from; None where no kernel tells."""
    if job is None or job.read_bytes_per_sample is None:
        return None
    if job.read_bytes_per_sample < FROM_MEMORY_BYTES:
        return Source.MEMORY()
    figures = {"sample": job.read_bytes_per_sample, "data": job.data_bytes, "memory": memory_bytes}
    if job.data_bytes is None or job.fits_in_memory is None:
        return Source.STORAGE_UNKNOWN(**figures)
    return (Source.STORAGE_AT_FIRST if job.fits_in_memory else Source.STORAGE)(**figures)


FROM_MEMORY_BYTES = 64
"""Less than this for each sample is what reading the code of the first batch takes."""
