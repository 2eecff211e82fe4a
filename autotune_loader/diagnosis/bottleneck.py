"""What limits the rate of a loader, with the figures that show it.

The first row of `_row` that holds is the answer (docs/bottleneck.md has them in order). Each rests on a clock or a count; where
two of them disagree, or nothing shows it, the answer is UNCLEAR, with both figures.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune_loader.diagnosis.evidence import FOREIGN_CPU_LIMIT, Evidence
from autotune_loader.diagnosis.tables import Bottleneck, Fact
from autotune_loader.results.record import Finding

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first waits for workers, and the last has no step after it."""
LITTLE_GAIN, LARGE_GAIN = 0.02, 9.0
"""What cannot bring more is not worth a sentence (it is also the tolerance of `tune()`); beyond ten times a figure would tell
how short the step is, and no more."""
LONG_START = 0.1
"""Share of the time in the starts of epochs from which on they count."""
COMPUTING_SHARE = 0.6
"""A fetch that has the CPU for more than this share of its time computes; below, it waits for storage or the network."""
TRANSFER_SHARE = 0.3
"""Receiving a batch costs more than this share of the loop: handing over is the bottleneck."""
COPY_SHARE = 0.5
"""Copies are the bottleneck where they are more than this share of what a batch takes beyond its step."""
HARDLY_WAITS = 0.05
"""The loop has its batches in time, or is as fast as the step alone, as far as clocks tell."""
MUCH_SLOWER = 0.8
"""A step that has its batches in time and is slower than this share of what it does alone is held up by something."""
MUCH_LONGER = 1.25
"""A step that takes so many times what it takes alone is worth a word: waiting alone does not explain the gain there is."""
RARELY_FETCHES = 0.2
"""Workers that fetch for less than this share of their time are not what a loop waits for."""
IDLE_SHARE = 0.15
"""More of the cores idle than this: there is one to gain with, and a fetch that waits does so for something else."""
LARGE_STAGE = 0.2
"""A stage that takes more than this share of a worker is worth naming."""
LARGE_BATCH_BYTES = 1 << 20
"""Below this size the fixed cost of a hand-over counts, not the bytes."""
CHEAP_BATCH_S, CHEAP_SAMPLE_S = 0.002, 50e-6
"""A batch that is fetched faster than this costs less than handing it over from a worker."""


def bottleneck_of(evidence: Evidence) -> Finding:
    """The bottleneck with its evidence, and as `gain` what a loader without any cost would bring at most."""
    row = _row(evidence)
    share = evidence.loader_share if row is Bottleneck.LITTLE else evidence.starting_share
    found = row(share=share, fetch=evidence.fetch_s, batches=evidence.batches or 0)
    if row in (Bottleneck.TOO_SHORT, Bottleneck.NO_STEP):
        return found
    facts = filter(None, _facts(row, evidence))
    return Finding(kind=found.kind, sentence=" ".join([found, *facts]), gain=evidence.headroom)


def _row(evidence: Evidence) -> Bottleneck:
    wait = evidence.wait_share
    if evidence.batches is not None and evidence.batches < FEWEST_BATCHES:
        return Bottleneck.TOO_SHORT
    if wait is None:
        return Bottleneck.NO_STEP
    if evidence.loader_share < LITTLE_GAIN and wait >= HARDLY_WAITS:
        return Bottleneck.LITTLE
    if evidence.starting_share > (LONG_START if evidence.fetch_s is None else max(LONG_START, wait / 2)):
        return Bottleneck.START_UP
    if evidence.ceiling is not None and evidence.samples_per_s >= (1 - HARDLY_WAITS) * evidence.ceiling.value:
        return Bottleneck.STEP
    if evidence.saved_s > max(COPY_SHARE * evidence.lost_s, LITTLE_GAIN * evidence.period_s):
        return Bottleneck.COPY
    if wait < HARDLY_WAITS:
        return _never_waiting(evidence)
    if evidence.ran_out is not None:
        return Bottleneck.MEMORY
    if evidence.fetch_s is None:
        return Bottleneck.UNCLEAR
    if evidence.config.num_workers == 0:
        is_cheap = evidence.fetch_s < max(CHEAP_BATCH_S, CHEAP_SAMPLE_S * evidence.batch_size)
        if is_cheap:
            return Bottleneck.IN_MEMORY
    if evidence.waiting is not None and evidence.waiting[1] > max(evidence.waiting[::2]):
        return Bottleneck.CORES
    if not evidence.config.num_workers:
        return _cpu_or_storage(evidence)
    if (evidence.receive_s or 0.0) > TRANSFER_SHARE * evidence.period_s:
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
    is_disturbed = (evidence.foreign_cpu_share or 0.0) > FOREIGN_CPU_LIMIT
    return Bottleneck.UNCLEAR if is_disturbed else Bottleneck.CPU


def _cpu_or_storage(evidence: Evidence) -> Bottleneck:
    fetch, is_full = evidence.undisturbed, (evidence.cpu_share or 0.0) > 1 - IDLE_SHARE
    if not is_full and evidence.fetching_share < RARELY_FETCHES:
        return Bottleneck.UNCLEAR
    if is_full or fetch.computing_share > COMPUTING_SHARE:
        return Bottleneck.CPU
    if evidence.waiting is not None and evidence.waiting[0] == max(evidence.waiting):
        return Bottleneck.TRANSFER if evidence.config.num_workers else Bottleneck.CPU
    # A fetch waits for something else than a core where cores were idle, or where it waits longer than others took these.
    others = fetch.foreign_cpu_share
    had_core = fetch.cpu_share is None or others is None or 1 - fetch.cpu_share - others > IDLE_SHARE
    waits_longer = fetch.computing_share <= COMPUTING_SHARE * (1 - (others or 0.0))
    return Bottleneck.STORAGE if had_core or waits_longer else Bottleneck.UNCLEAR


def _facts(row: Bottleneck, evidence: Evidence) -> Iterator[Finding | None]:
    """What shows it, a sentence each."""
    fetch, trial, ceiling = evidence.undisturbed, evidence.ran_out, evidence.ceiling
    foreign = evidence.foreign_cpu_share or 0.0
    match row:
        case Bottleneck.CPU:
            yield Fact.CPU_OF_BATCH(cpu=evidence.fetch_cpu_s, step=evidence.step_s)
            if evidence.cpu_share is not None:
                yield Fact.CORES(share=min(1.0, evidence.cpu_share), cores=round(evidence.cores))
        case Bottleneck.STORAGE:
            yield Fact.WAITED(fetch=fetch.fetch_s, cpu=fetch.fetch_cpu_s)
            yield _stage_that_waits(evidence)
        case Bottleneck.CORES if evidence.waiting is not None:
            yield Fact.FOR_A_CORE(share=evidence.waiting[1], cores=round(evidence.cores))
        case Bottleneck.TRANSFER:
            receiving = Fact.RECEIVING if evidence.batch_bytes else Fact.RECEIVING_ONE
            yield receiving(size=evidence.batch_bytes, receive=evidence.receive_s)
        case Bottleneck.COPY:
            yield Fact.COPYING(size=evidence.batch_bytes, copy=evidence.copy_s)
        case Bottleneck.MEMORY if trial is not None and trial.failure is not None:
            yield Fact.RAN_OUT(config=trial.config, kind=trial.failure.kind.replace("_", " "))
        case Bottleneck.UNCLEAR:
            if evidence.fetch_s is not None and (evidence.wait_share or 0.0) >= HARDLY_WAITS:
                yield Fact.WAITED(fetch=fetch.fetch_s, cpu=fetch.fetch_cpu_s)
                yield Fact.FETCHES(share=evidence.fetching_share)
            yield Fact.BUSY(share=foreign) if foreign > HARDLY_WAITS else None
        case Bottleneck.LITTLE:
            return
    yield Fact.WAITS(wait=evidence.wait_share)
    if row in (Bottleneck.STEP, Bottleneck.UNCLEAR):
        yield None if ceiling is None else Fact.OF_CEILING(rate=evidence.samples_per_s, ceiling=ceiling.value)
    elif row is not Bottleneck.START_UP:
        gain, alone_s = evidence.headroom or 0.0, 0.0 if ceiling is None else evidence.batch_size / ceiling.value
        if alone_s and (evidence.step_s or 0.0) - (evidence.copy_s or 0.0) > MUCH_LONGER * alone_s:
            is_disturbed = foreign > FOREIGN_CPU_LIMIT
            yield Fact.BUSY(share=foreign) if is_disturbed else Fact.SHARED_CORES(step=evidence.step_s, alone=alone_s)
        bound = Fact.AT_MOST if alone_s else Fact.ABOUT  # steps that wait for no data may be shorter
        if gain >= LARGE_GAIN:
            yield Fact.MUCH()
        elif gain >= LITTLE_GAIN:
            yield bound(factor=1 + gain)


def _stage_that_waits(evidence: Evidence) -> Finding | None:
    """The stage with the largest part of a worker's waiting, and its line; one that computes is named by the advice."""
    longest = max(evidence.stages, key=lambda each: each.waited_s, default=None)
    whole_s = sum(each.waited_s for each in evidence.stages)
    if longest is None or not whole_s or longest.waited_s < LARGE_STAGE * whole_s:
        return None
    return Fact.STAGE_WAITS(stage=longest.stage, share=longest.waited_s / whole_s, where=longest.where)
