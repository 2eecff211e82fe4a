"""What the loops over a loader of a script show: where their seconds went, what limits them, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from autotune_loader.diagnosis.account import Account, Fetching, account_of
from autotune_loader.diagnosis.causes import Job, NamedCause, causes
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.judge import FEWEST_BATCHES, diagnose
from autotune_loader.diagnosis.messages import Advice, Bottleneck
from autotune_loader.results.result import Finding

if TYPE_CHECKING:
    from autotune_loader.loops.figures import LoopFigures

WORTH_TRYING = 0.05
"""A gain below this, at most, is not worth another run."""
OTHER_SETTINGS_HELP = (Bottleneck.CPU, Bottleneck.STORAGE, Bottleneck.TRANSFER, Bottleneck.UNCLEAR)
"""Where other workers may bring something."""


class Judged(NamedTuple):
    """What the loops over one loader show."""

    account: Account
    bottleneck: Finding
    causes: tuple[NamedCause, ...]
    advice: tuple[Finding, ...]  # the command that tries other settings, where it could pay, then the best first
    samples_per_s: float | None  # None where too little was seen


def judge_loops(figures: LoopFigures, where: str, job: Job) -> Judged:
    """What is to be said of a loader, by the line that makes it."""
    totals, fetching = figures.log.totals, fetching_of(figures)
    account = account_of(totals, figures.log.waits, fetching, has_workers=figures.has_workers)
    evidence = evidence_of(figures, fetching, job)
    bottleneck, advice = diagnose(evidence)
    is_seen = totals.batches >= FEWEST_BATCHES and totals.stepped_s > 0
    return Judged(
        account=account,
        bottleneck=bottleneck,
        causes=causes(figures, account, where, job),
        advice=(*_to_try(bottleneck, evidence, job), *advice),
        samples_per_s=evidence.samples_per_s if is_seen else None,
    )


def fetching_of(figures: LoopFigures) -> Fetching:
    """What a batch takes to make, by what torch's workers and ours note.

    Those of other iterators note nothing. Where the loop waits, they have no time to rest: a batch takes each of them the time
    in which so many batches come as there are workers.
    """
    totals, waits, seen, workers = figures.log.totals, figures.log.waits, figures.of_workers, figures.own.num_workers
    receiving = figures.in_loop.of_one
    queued_s = 0.0 if receiving is None else receiving.queued_s
    making = (figures.in_workers if workers else figures.in_loop).of_one
    if waits.batches:
        usual = max(1, waits.batches - waits.slow)
        seconds, cpu_s = (waits.fetched_s - waits.slow_fetches_s) / usual, (waits.cpu_s - waits.slow_cpu_s) / usual
        if not figures.has_workers:
            return Fetching(seconds=seconds, cpu_s=0.0 if making is None else making.cpu_s, queued_s=queued_s)
        own_s = seen.queued_s / seen.batches if seen.batches else 0.0 if making is None else making.queued_s
        return Fetching(seconds=seconds, cpu_s=cpu_s, queued_s=own_s, receive_queued_s=queued_s)
    if making is None:
        return Fetching()
    whole_s = (workers * totals.active_s if workers else totals.asking_s) / totals.batches
    own_s = queued_s if workers else 0.0
    return Fetching(seconds=whole_s, cpu_s=making.cpu_s, queued_s=making.queued_s, receive_queued_s=own_s)


def evidence_of(figures: LoopFigures, fetching: Fetching, job: Job) -> Evidence:
    """What was measured of a loader. While a fetch waits for a core it waits for no data, so that time is left out."""
    totals, waits, is_known = figures.log.totals, figures.log.waits, fetching.seconds is not None
    seconds = waits.fetched_s / waits.batches if waits.batches else fetching.seconds or 0.0
    receiving = figures.in_loop.of_one if figures.own.num_workers else None
    return Evidence(
        config=figures.own,
        samples_per_s=totals.samples / max(totals.active_s, 1e-9),
        wait_share=totals.wait_share,
        cores=job.cores,
        cpu_share=figures.busy_s / (job.cores * figures.read_s) if figures.read_s else None,
        batch_size=totals.samples / totals.batches,
        step_s=totals.stepped_s / totals.batches,
        fetch_s=max(fetching.cpu_s, seconds - fetching.queued_s) if is_known else None,
        fetch_cpu_s=fetching.cpu_s if is_known else None,
        fetch_queued_s=fetching.queued_s if is_known else None,
        receive_queued_s=0.0 if receiving is None else receiving.queued_s,
        receive_s=None if receiving is None else receiving.cpu_s,
        starting_share=totals.starting_share,
        loader_share=totals.waited_s / max(job.active_s, 1e-9),
        batches=totals.batches,
        batch_bytes=figures.batch_bytes or 0,
        parent=figures.log.parent,
        on_accelerator=job.on_accelerator,
    )


def _to_try(bottleneck: Finding, evidence: Evidence, job: Job) -> Iterator[Finding]:
    """The command that tries other settings, where it could pay."""
    is_limited = any(row.said_by(bottleneck) for row in OTHER_SETTINGS_HELP)
    has_core = evidence.cores > 1 or not Bottleneck.CPU.said_by(bottleneck)
    if not job.is_tuned and is_limited and has_core and (evidence.headroom or 0.0) >= WORTH_TRYING:
        has_workers = evidence.config.num_workers > 0
        yield Advice.RUN(command=job.to_tune) if has_workers else Advice.RUN_WITH_WORKERS(command=job.to_allow)
