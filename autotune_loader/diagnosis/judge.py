"""From figures to findings, written once for `tune()`, `compare()`, AutoLoader and `watch`."""

from __future__ import annotations

from dataclasses import replace

from autotune_loader.diagnosis.advice import advise
from autotune_loader.diagnosis.bottleneck import bottleneck_of
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.tables import Bottleneck, Caution, Source
from autotune_loader.results.record import Finding
from autotune_loader.results.result import TuningResult

BURSTS_DIFFER = 0.15
"""A burst and the step alone may differ by so much, and nothing is wrong."""
HARDLY_STEPS = 0.95
"""A loop that waits for more than this tells nothing of its step."""
FROM_MEMORY_BYTES = 64
"""Less than this for each sample is what reading the code of the first batch takes."""


def diagnose(evidence: Evidence) -> tuple[Finding, tuple[Finding, ...]]:
    """What limits a loader, and what to do about it, from what was measured of it alone.

    The `gain` of what limits it is what a loader without any cost would bring at most.
    """
    if ceiling_doubt(evidence) is not None:
        evidence = replace(evidence, ceiling=None)
    bottleneck = bottleneck_of(evidence)
    return bottleneck, advise(evidence, bottleneck)


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


def ceiling_doubt(evidence: Evidence) -> Finding | None:
    """Why the ceiling is none: no rate may lie above it, and no step be faster in the loop than alone."""
    if evidence.ceiling is None:
        return None
    alone, wait = evidence.ceiling.value, evidence.wait_share or 0.0
    rates = [each.samples_per_s.value for config, each in evidence.bursts if config.batch_size is None]
    in_loop = evidence.samples_per_s / (1 - wait) if wait <= HARDLY_STEPS else evidence.samples_per_s
    fastest = max([in_loop, *rates])
    return Caution.CEILING_PASSED(alone=alone, rate=fastest) if fastest > (1 + BURSTS_DIFFER) * alone else None


def source_of(sample: float | None, data: int | None, memory: int | None, *, fits: bool | None) -> Finding | None:
    """Where bursts had their samples from, and where training will have them from; None where no kernel tells.

    Args:
        sample: bytes that bursts read from storage for one.
        data: bytes that all samples of an epoch take at this rate.
        memory: bytes of the machine.
        fits: whether that much data can stay in memory from one epoch to the next.
    """
    if sample is None:
        return None
    if sample < FROM_MEMORY_BYTES:
        return Source.MEMORY()
    row = Source.STORAGE if fits is None else Source.STORAGE_AT_FIRST if fits else Source.STORAGE_ALWAYS
    return row(sample=sample, data=data, memory=memory)
