"""Why a loader of a script costs time or memory: twelve causes, each with its number, its line, and one thing to do.

A cause is named where it takes 5% of the training's time, 10% where it is the storage or the cores, or much memory. Each rests
on a clock or a count of its own, so that several may hold at once; the one that costs most comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune_loader.diagnosis.account import Account
from autotune_loader.diagnosis.judge import LARGE_PARENT_BYTES
from autotune_loader.diagnosis.tables import Advice, Cause
from autotune_loader.results.record import Finding

if TYPE_CHECKING:
    from autotune_loader.pipeline.forking import ParentProcess
    from autotune_loader.pipeline.loop_log import Totals
    from autotune_loader.pipeline.waits import Waits

FEWEST_BATCHES = 8
"""Fewer say nothing of what comes back."""
TIME_SHARE, RESOURCE_SHARE, LEAST_S = 0.05, 0.1, 0.1
"""Of the time with all loaders, and seconds, from which on a cause is named; a resource, which is always waited for a little,
later."""
MANY_TENSORS = 16
"""Of a batch."""
READY_S = 0.2
"""A worker that is not ready after so long imports or unpickles."""
COPIED_BYTES, COPIED_SHARE = 64 << 20, 0.1
"""A worker that has copied so much, and this share of what it shared, goes on copying."""
GARBAGE = "garbage_collection"
"""The kind of two rows: collections in workers and in the loop."""
IDLE_BYTES, IDLE_SHARE = 256 << 20, 0.5
"""Memory of idle workers, and the share of their lives that they are idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCause:
    """One cause as a report has it."""

    kind: str
    """Such as "pinning": the name of its row, in lower case."""
    sentence: str
    """For people, with the number that shows it and the line of the script."""
    seconds: float | None = None
    """What it takes of the loops; None where it takes memory."""
    advice: str = ""
    """One thing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What was seen of a loader's loops and workers."""

    where: str
    """The line that makes it."""
    totals: Totals
    waits: Waits
    account: Account
    workers: int
    is_persistent: bool
    command: str | None
    """What tunes the script's loaders; None where it does so already."""
    script_s: float
    """The time in steps and waiting with all loaders."""
    tensors: int = 0
    """Of a batch."""
    ready_s: float = 0.0
    """Until they were ready, of all workers over all epochs."""
    started: int = 0
    """Workers that have made a batch, over all epochs."""
    on_device: int = 0
    garbage_s: float = 0.0
    """Of garbage collections in workers."""
    copied_bytes: int = 0
    idle_s: float = 0.0
    idle_bytes: int = 0
    parent: ParentProcess | None = None


def causes(signs: Signs) -> tuple[NamedCause, ...]:
    """The causes that hold, the one that takes most time first, those that take memory last."""
    found = [*_of_starts(signs), *_of_garbage(signs), *_of_waits(signs), *_of_resources(signs), *_of_memory(signs)]
    if any(each.kind == GARBAGE for each in found):  # it writes to each object that it looks at
        found = [each for each in found if each.kind != Cause.COPIED_PAGES.kind]
    return tuple(sorted(found, key=lambda each: -(each.seconds or 0.0)))


def _named(finding: Finding, advice: str, seconds: float | None = None, kind: str | None = None) -> NamedCause:
    return NamedCause(kind=kind or finding.kind, sentence=str(finding), seconds=seconds, advice=str(advice))


def _least_s(signs: Signs, share: float = TIME_SHARE) -> float:
    return max(LEAST_S, share * signs.script_s) if signs.totals.batches >= FEWEST_BATCHES else float("inf")


def _tuned_or(signs: Signs, tuned: Advice, otherwise: Advice) -> Finding:
    """The advice that names the command, or another one where that runs already."""
    return otherwise() if signs.command is None else tuned(command=signs.command)


def _of_starts(signs: Signs) -> Iterator[NamedCause]:
    totals, account = signs.totals, signs.account
    seconds = account.starting_workers + account.first_batches
    if not signs.workers or seconds < _least_s(signs):
        return
    epochs, keeps = totals.epochs, signs.is_persistent or totals.epochs < 2
    each_s = signs.ready_s / max(1, signs.started)
    if 2 * signs.ready_s >= seconds and each_s >= READY_S:  # they may start one after the other
        advice = _tuned_or(signs, Advice.START_ONCE, Advice.KEEP_WORKERS)
        told = Cause.WORKER_IMPORTS(where=signs.where, each=each_s, seconds=seconds, epochs=epochs)
        yield _named(told, advice, seconds)
    elif not keeps:
        told = Cause.WORKER_STARTS(where=signs.where, workers=signs.workers, epochs=epochs, seconds=seconds)
        yield _named(told, Advice.KEEP_WORKERS(), seconds)


def _of_garbage(signs: Signs) -> Iterator[NamedCause]:
    totals, account = signs.totals, signs.account
    share = signs.garbage_s / (signs.workers * totals.active_s) if signs.workers else 0.0
    sent_s = account.transfer  # by a thread of the worker
    in_workers_s = share * (account.computing + account.core + sent_s)
    in_loop_s = totals.step_garbage_s + (0.0 if signs.workers else totals.wait_garbage_s)
    if in_workers_s >= _least_s(signs):
        yield _named(Cause.GARBAGE_IN_WORKERS(where=signs.where, share=share), Advice.FREEZE(), in_workers_s, GARBAGE)
    elif in_loop_s >= _least_s(signs):
        told = Cause.GARBAGE_IN_LOOP(where=signs.where, seconds=in_loop_s, share=in_loop_s / totals.active_s)
        yield _named(told, Advice.FREEZE(), in_loop_s, GARBAGE)


def _of_waits(signs: Signs) -> Iterator[NamedCause]:
    account, waits, least_s = signs.account, signs.waits, _least_s(signs)
    if account.slow_samples >= least_s:
        told = Cause.SLOW_SAMPLES(
            where=signs.where,
            slow=waits.slow,
            batches=waits.batches,
            long=waits.slow_fetches_s / waits.slow,
            usual=waits.usual_s,
            seconds=account.slow_samples,
        )
        yield _named(told, _tuned_or(signs, Advice.LATE_BATCHES, Advice.OUT_OF_ORDER), account.slow_samples)
    if account.pinning >= least_s:
        each = waits.pinned_s / waits.batches
        told = Cause.PINNING(where=signs.where, seconds=account.pinning, each=each)
        yield _named(told, Advice.DO_NOT_PIN(), account.pinning)
    if signs.workers and signs.tensors >= MANY_TENSORS and account.transfer >= least_s:
        told = Cause.MANY_TENSORS(where=signs.where, tensors=signs.tensors, seconds=account.transfer)
        yield _named(told, _tuned_or(signs, Advice.ONE_MESSAGE, Advice.STACK), account.transfer)


def _of_resources(signs: Signs) -> Iterator[NamedCause]:
    account = signs.account
    largest = max(account.computing, account.core, account.storage, account.slow_samples, account.transfer)
    if max(account.core, account.storage) < max(_least_s(signs, RESOURCE_SHARE), largest):
        return
    if account.core > account.storage:
        many = signs.workers > 1
        advice = Advice.FEWER_WORKERS(workers=signs.workers) if many else Advice.MORE_CORES()
        yield _named(Cause.CORES(where=signs.where, seconds=account.core), advice, account.core)
    else:
        told = Cause.STORAGE(where=signs.where, seconds=account.storage)
        yield _named(told, _tuned_or(signs, Advice.MORE_WORKERS, Advice.LARGER_READS), account.storage)


def _of_memory(signs: Signs) -> Iterator[NamedCause]:
    parent, lived_s = signs.parent, signs.idle_s + signs.totals.active_s
    if parent is not None and parent.own_bytes >= LARGE_PARENT_BYTES and not parent.is_elastic:
        told = Cause.TRAINING_MEMORY(where=signs.where, memory=parent.own_bytes)
        yield _named(told, Advice.FORKSERVER_BY_AUTOLOADER())
    if parent is not None and signs.copied_bytes >= max(COPIED_BYTES, COPIED_SHARE * parent.own_bytes):
        told = Cause.COPIED_PAGES(where=signs.where, size=signs.copied_bytes, workers=signs.workers)
        yield _named(told, Advice.SMALLER_WORKERS())
    if signs.on_device:
        told = Cause.DEVICE_IN_WORKER(where=signs.where, count=signs.on_device, workers=signs.started)
        yield _named(told, Advice.LOAD_ON_CPU())
    if signs.idle_bytes >= IDLE_BYTES and signs.idle_s >= IDLE_SHARE * lived_s:
        share = signs.idle_s / lived_s
        told = Cause.IDLE_MEMORY(where=signs.where, workers=signs.workers, size=signs.idle_bytes, share=share)
        yield _named(told, Advice.LET_WORKERS_GO())


def slow_rank(where: str, ranks: Sequence[tuple[Account, str]]) -> NamedCause | None:
    """The rank for whose batches of one loader the others wait, if any.

    Args:
        where: the line that makes the loader.
        ranks: the account of each rank, by its number, and its bottleneck.
    """
    waits = [account.waiting for account, _ in ranks]
    slow, other = (best(range(len(waits)), key=waits.__getitem__) for best in (max, min))
    more_s, longer_s = waits[slow] - waits[other], ranks[other][0].step - ranks[slow][0].step
    active_s = ranks[other][0].step + waits[other]
    if len(ranks) < 2 or more_s < 2 * TIME_SHARE * active_s or longer_s < more_s / 2:  # it may not be waited for
        return None
    told = Cause.SLOW_RANK(where=where, rank=slow, its=waits[slow], other=other, others=waits[other])
    return _named(told, Advice.BALANCE_RANKS(rank=slow, bottleneck=ranks[slow][1]), more_s)
