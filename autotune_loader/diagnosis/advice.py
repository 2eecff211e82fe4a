"""What to do next: one to three sentences for each bottleneck, with the figures that call for them."""

from __future__ import annotations

from collections.abc import Iterator

from autotune_loader.diagnosis.bottleneck import LARGE_BATCH_BYTES, LARGE_STAGE
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.tables import Advice, Bottleneck
from autotune_loader.results.record import Finding
from autotune_loader.values.stages import HAND_OVER

PYTHON_SAMPLE_S = 200e-6
"""Fetching a sample faster than this is mostly Python's overhead per sample, which a batched fetch saves."""
THREADED_CORES = 1.3
"""A worker that keeps more cores than this busy starts threads of its own."""
CHEAPER = {
    "decode": ": smaller source images, a faster decoder, or decoded once and kept",
    "read": ": larger pieces, or files that need no parsing",
    "collate": ": fewer and larger tensors",
}
NO_LINES = (HAND_OVER, "other threads")
"""Stages that are no lines of the user's."""


def advise(evidence: Evidence, bottleneck: Finding) -> tuple[Finding, ...]:
    """What the bottleneck calls for, the best first."""
    return tuple(_advice(evidence, bottleneck))


def _advice(evidence: Evidence, bottleneck: Finding) -> Iterator[Finding]:
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
        case Bottleneck.STORAGE:
            yield Advice.LARGER_READS(wait=max(0.0, 1 - evidence.undisturbed.computing_share))
        case Bottleneck.HAND_OVER:
            is_large = evidence.batch_bytes >= LARGE_BATCH_BYTES
            row = Advice.SEND_LESS if is_large else Advice.HAND_OVER_LESS_OFTEN
            yield row(size=evidence.batch_bytes, receive=evidence.receive_s)
            yield Advice.AUTOLOADER_HANDS_OVER(workers=config.num_workers)
        case Bottleneck.MEMORY:
            failure = None if evidence.ran_out is None else evidence.ran_out.failure
            is_shared = failure is not None and failure.kind == "shared_memory"
            yield Advice.MORE_SHARED_MEMORY() if is_shared else Advice.SMALLER_WORKERS()
        case Bottleneck.START_UP if config.num_workers and not config.persistent_workers:
            yield Advice.KEEP_WORKERS()


def _cheaper_fetching(evidence: Evidence) -> Iterator[Finding]:
    """The stages that take much of a worker's CPU, the largest first; the transforms as a whole where none is known."""
    large = [each for each in evidence.stages if each.cpu_share >= LARGE_STAGE and each.stage not in NO_LINES]
    for each in sorted(large, key=lambda stage: -stage.cpu_share):
        how = CHEAPER.get(each.stage, "")
        yield Advice.CHEAPER_STAGE(stage=each.stage, where=each.where, how=how, share=each.cpu_share, cpu=each.cpu_s)
    if not large and evidence.fetch_cpu_s:
        yield Advice.CHEAPER_TRANSFORMS(cpu=evidence.fetch_cpu_s / evidence.batch_size)
    if evidence.config.num_workers and evidence.computing_share > THREADED_CORES:
        yield Advice.ONE_THREAD_WORKERS(busy=evidence.computing_share)


def _batched_fetch(evidence: Evidence) -> Iterator[Finding]:
    sample_s = (evidence.fetch_s or 0.0) / evidence.batch_size
    is_python = 0 < sample_s <= PYTHON_SAMPLE_S and evidence.undisturbed.computing_share >= 0.5
    if is_python and not evidence.has_batched_fetch:
        yield Advice.BATCHED_FETCH(sample=sample_s)
