"""Why a loader of a script costs time or memory: twelve causes, each with its number, its line, and one thing to do.

A cause is named where it takes 5% of the training's time, 10% where it is the storage or the cores, or much memory. Each rests
on a clock or a count of its own, so that several may hold at once; the one that costs most comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune_loader.diagnosis.account import Account
from autotune_loader.diagnosis.judge import LARGE_PARENT_BYTES
from autotune_loader.diagnosis.messages import Advice, Cause
from autotune_loader.results.result import Finding

if TYPE_CHECKING:
    from autotune_loader.loops.figures import LoopFigures

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
class Job:
    """The script that a loader is of, and where it runs."""

    active_s: float
    """Seconds of steps and waiting with all loaders."""
    cores: float
    on_accelerator: bool
    to_tune: str
    """The command that tunes its loaders."""
    to_allow: str
    """The same where loaders without workers may have some."""
    is_tuned: bool
    """Whether that runs already."""


class Case(NamedTuple):
    """A loader of a script, and the line that makes it."""

    figures: LoopFigures
    account: Account
    where: str
    job: Job

    @property
    def workers(self) -> int:
        """Those that the script has asked for."""
        return self.figures.own.num_workers

    def least_s(self, share: float = TIME_SHARE) -> float:
        """Seconds from which on something is named."""
        is_long = self.figures.log.totals.batches >= FEWEST_BATCHES
        return max(LEAST_S, share * self.job.active_s) if is_long else math.inf

    def named(self, row: Cause, advice: Finding, seconds: float | None = None, **figures: Any) -> NamedCause:
        """A cause, with its figures."""
        sentence = row(where=self.where, workers=self.workers, seconds=seconds, **figures)
        return NamedCause(kind=row.kind, sentence=str(sentence), seconds=seconds, advice=str(advice))

    def tuned_or(self, tuned: Advice, otherwise: Advice) -> Finding:
        """The advice that names the command, or another one where that runs already."""
        command = self.job.to_tune if self.workers else self.job.to_allow
        return otherwise() if self.job.is_tuned else tuned(command=command)


def causes(figures: LoopFigures, account: Account, where: str, job: Job) -> tuple[NamedCause, ...]:
    """The causes that hold for a loader, the one that takes most time first, those that take memory last."""
    case = Case(figures, account, where, job)
    found = [each for rule in (_starts, _garbage, _waits, _resources, _memory) for each in rule(case)]
    if any(each.kind == Cause.GARBAGE_COLLECTION.kind for each in found):  # it writes to each object that it looks at
        found = [each for each in found if each.kind != Cause.COPIED_PAGES.kind]
    return tuple(sorted(found, key=lambda each: -(each.seconds or 0.0)))


def _starts(case: Case) -> Iterator[NamedCause]:
    epochs, seen = case.figures.log.totals.epochs, case.figures.of_workers
    waits, is_forked = case.figures.log.waits, case.figures.log.parent is not None
    fetches_s = epochs * waits.fetched_s / max(1, waits.batches)  # of first batches, also of kept workers
    seconds = case.account.starting_workers + max(0.0, case.account.first_batches - fetches_s)
    each_s, may_be_kept = seen.ready_s / max(1, seen.started), epochs > 1 and not case.figures.own.persistent_workers
    if not case.workers or seconds < case.least_s():
        return
    if 2 * seen.ready_s >= seconds and each_s >= READY_S:  # they may start one after the other
        row = Cause.WORKER_INIT if is_forked else Cause.WORKER_IMPORTS
        if not is_forked and not case.job.is_tuned:
            yield case.named(row, Advice.START_ONCE(command=case.job.to_tune), seconds, each=each_s)
        elif may_be_kept:
            yield case.named(row, Advice.KEEP_WORKERS(), seconds, each=each_s)
    elif may_be_kept:
        yield case.named(Cause.WORKER_STARTS, Advice.KEEP_WORKERS(), seconds, epochs=epochs)


def _garbage(case: Case) -> Iterator[NamedCause]:
    totals, account = case.figures.log.totals, case.account
    share = case.figures.of_workers.garbage_s / (case.workers * totals.active_s) if case.workers else 0.0
    in_workers_s = share * (account.computing + account.core + account.transfer)  # a thread of the worker transfers
    in_loop_s = totals.step_garbage_s + (0.0 if case.workers else totals.wait_garbage_s)
    row, advice = Cause.GARBAGE_COLLECTION, Advice.FREEZE()
    if in_workers_s >= case.least_s():
        yield case.named(row, advice, in_workers_s, share=share, process="each worker")
    elif in_loop_s >= case.least_s():
        yield case.named(row, advice, in_loop_s, share=in_loop_s / totals.active_s, process="the training loop")


def _waits(case: Case) -> Iterator[NamedCause]:
    account, waits, least_s = case.account, case.figures.log.waits, case.least_s()
    if account.slow_samples >= least_s:
        long = {"long": waits.slow_fetches_s / waits.slow, "usual": waits.usual_s}
        advice = case.tuned_or(Advice.LATE_BATCHES, Advice.OUT_OF_ORDER)
        yield case.named(
            Cause.SLOW_SAMPLES, advice, account.slow_samples, slow=waits.slow, batches=waits.batches, **long
        )
    if account.pinning >= least_s:
        each_s = waits.pinned_s / waits.batches
        yield case.named(Cause.PINNING, Advice.DO_NOT_PIN(), account.pinning, each=each_s)
    tensors = case.figures.batch_tensors
    if case.workers and tensors >= MANY_TENSORS and account.transfer >= least_s:
        advice = case.tuned_or(Advice.ONE_MESSAGE, Advice.STACK)
        yield case.named(Cause.MANY_TENSORS, advice, account.transfer, tensors=tensors)


def _resources(case: Case) -> Iterator[NamedCause]:
    account = case.account
    largest = max(account.computing, account.core, account.storage, account.slow_samples, account.transfer)
    if max(account.core, account.storage) < max(case.least_s(RESOURCE_SHARE), largest):
        return
    if account.core > account.storage:
        many = case.workers > 1
        advice = Advice.FEWER_WORKERS(workers=case.workers) if many else Advice.MORE_CORES()
        yield case.named(Cause.CORES, advice, account.core)
    else:
        yield case.named(Cause.STORAGE, case.tuned_or(Advice.MORE_WORKERS, Advice.LARGER_READS), account.storage)


def _memory(case: Case) -> Iterator[NamedCause]:
    parent, seen = case.figures.log.parent, case.figures.of_workers
    lived_s = seen.idle_s + case.figures.log.totals.active_s
    if parent is not None and parent.own_bytes >= LARGE_PARENT_BYTES and not parent.is_elastic:
        yield case.named(Cause.TRAINING_MEMORY, Advice.FORKSERVER_BY_AUTOLOADER(), memory=parent.own_bytes)
    if parent is not None and seen.copied_bytes >= max(COPIED_BYTES, COPIED_SHARE * parent.own_bytes):
        yield case.named(Cause.COPIED_PAGES, Advice.SMALLER_WORKERS(), size=seen.copied_bytes)
    if seen.on_device:
        yield case.named(Cause.DEVICE_IN_WORKER, Advice.LOAD_ON_CPU(), count=seen.on_device, started=seen.started)
    is_kept = case.figures.own.persistent_workers
    if is_kept and seen.idle_bytes >= IDLE_BYTES and seen.idle_s >= IDLE_SHARE * lived_s:
        share = seen.idle_s / lived_s
        yield case.named(Cause.IDLE_MEMORY, Advice.LET_WORKERS_GO(), size=seen.idle_bytes, share=share)


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
    advice = Advice.BALANCE_RANKS(rank=slow, bottleneck=ranks[slow][1])
    return NamedCause(kind=told.kind, sentence=str(told), seconds=more_s, advice=str(advice))
