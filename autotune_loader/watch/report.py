"""What is told of a script's loaders at its end: a block for each, the one with most time first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune_loader import TuningResult
from autotune_loader.diagnosis import Advice, Bottleneck, Caution, Evidence, Finding, Kept, diagnose
from autotune_loader.machine.limits import usable_cores
from autotune_loader.report.script import LoaderReport, ScriptReport
from autotune_loader.watch.others import ProcessReport, leave
from autotune_loader.watch.run_plan import Plan, say
from autotune_loader.watch.session import Session
from autotune_loader.watch.watched import FEWEST_BATCHES, ScriptLoader

WORTH_TRYING = 0.05
"""A gain below this, at most, is not worth another run."""
TURNS = 4
"""Each worker of a stream had its turn after so many batches for each; torch asks for two of each at first."""
OTHER_SETTINGS_HELP = (Bottleneck.CPU, Bottleneck.STORAGE, Bottleneck.TRANSFER, Bottleneck.UNCLEAR)
"""Where other workers may bring something."""


def seen_of(session: Session) -> ProcessReport:
    """What is known now of the loaders that gave a batch: once, for the terminal and for the files."""
    for each in session.loaders:
        each.log.marks.settle(time.monotonic(), is_end=True)
    known = session.known
    script_s = sum(each.log.totals.active_s for each in known)
    reports = [_report_of(each, script_s, session.plan) for each in known]
    main, report = max(zip(known, reports, strict=True), key=lambda both: both[1].seconds)
    return ProcessReport(
        rank=session.rank,
        ranks=session.ranks,
        report=ScriptReport(
            verb=session.plan.verb,
            seconds=time.monotonic() - session.begun,
            loaders=tuple(sorted(reports, key=lambda each: -each.seconds)),
        ),
        result=_result_of(main, report, {each.name: each.settings_now for each in reports}),
    )


def tell(seen: Sequence[ProcessReport], plan: Plan, *, flushes: bool = True) -> None:
    """Print the report and write the files that were asked for; what cannot be written is said, not raised.

    Of the ranks of a job, rank 0 speaks; of a script's processes, the one that the command has started.
    """
    if plan.is_told_elsewhere and leave(seen[0], str(plan.folder)):
        return
    if not (told := [each for each in seen if not each.rank]):
        return
    main, report = max(told, key=lambda each: each.main.seconds), report_of(told)
    notes = [text.sentence for each in seen if (text := each.too_long(plan)) is not None][:1]
    notes += [] if main.ranks == 1 else [f"These are the loaders of rank 0 of {main.ranks}."]
    notes += [_written(plan.output, main.result.save)] if plan.output else []
    report = replace(report, notes=tuple(notes))
    if plan.report:
        report = replace(report, notes=(*notes, _written(plan.report, report.save)))
    say(f"\n{report}", flushes=flushes)


def write_result(session: Session) -> None:
    """What was found until now, while the script goes on."""
    if session.plan.output and not session.rank and session.known:
        _written(session.plan.output, seen_of(session).result.save)


def report_of(seen: Sequence[ProcessReport]) -> ScriptReport:
    """One report; the same loader in several processes is told of once, as the one that has most time."""
    loaders: dict[tuple[str, str, str], LoaderReport] = {}
    for each in sorted((each for one in seen for each in one.report.loaders), key=lambda each: -each.seconds):
        known = loaders.setdefault(alike := (each.name, each.contents, str(each.settings)), each)
        if known is not each:
            loaders[alike] = replace(known, processes=known.processes + 1)
    longest = max(seen, key=lambda each: each.report.seconds).report
    return replace(longest, loaders=tuple(loaders.values()))


def _report_of(loader: ScriptLoader, script_s: float, plan: Plan) -> LoaderReport:
    totals, found, samples = loader.log.totals, loader.told, loader.epoch_samples
    evidence = evidence_of(loader, script_s)
    bottleneck, advice = diagnose(evidence)
    is_seen = totals.batches >= FEWEST_BATCHES and totals.stepped_s > 0
    rate, wait = evidence.samples_per_s if is_seen else None, totals.wait_share
    is_changed = found is not None and found.best != found.tuner.asked
    # Of the loops as a whole, some batches were made with other settings.
    if found is not None and found.has_tried and (result := found.result).rate is not None:
        bottleneck, advice, rate, wait = result.bottleneck, result.advice, result.rate.value, result.wait_share
    kept = loader.kept if found is None else found.kept
    idle, shards = _of_stream(loader)
    return LoaderReport(
        name=loader.name,
        contents=loader.site.contents(next(iter(samples)) if len(samples) == 1 else None),
        epochs=totals.epochs,
        batches=totals.batches,
        seconds=totals.active_s,
        samples_per_s=rate,
        wait_share=wait,
        gpu_utilization=loader.gpu_busy_s / loader.gpu_s if loader.gpu_s else None,
        settings=loader.own.arguments(),
        settings_now=(loader.own if found is None else found.best).arguments(),
        speedup=found.gain if is_changed else None,
        kept=kept,
        delivered=tuple(loader.delivered[each] for each in range(loader.own.num_workers)) if loader.delivered else None,
        idle_workers=idle,
        starts_anew=None if found is None else found.starts_anew,
        read_ahead=Caution.READ_AHEAD(thread=loader.reader) if loader.is_read_ahead else None,
        bottleneck=bottleneck,
        advice=(*shards, *_to_try(bottleneck, evidence, kept, plan), *advice),
    )


def _of_stream(loader: ScriptLoader) -> tuple[Finding | None, tuple[Finding, ...]]:
    """Whether workers of a stream had nothing to deliver, once each had its turn, and what to do."""
    workers, busy = loader.own.num_workers, len(loader.delivered)
    if not busy or busy >= workers or loader.delivered.total() < TURNS * workers:
        return None, ()
    return Caution.IDLE_WORKERS(idle=workers - busy, workers=workers), (Advice.SPREAD_SHARDS(busy=busy),)


def evidence_of(loader: ScriptLoader, script_s: float) -> Evidence:
    """What was measured of a loader; `script_s` is the time with all loaders.

    Workers of torch's do not tell how long a batch takes them. Where the loop waits, they have no time to rest: a batch takes
    each of them the time in which so many batches come as there are workers. While a fetch waits for a core it waits for no
    data, so that time is left out.
    """
    totals, workers = loader.log.totals, loader.own.num_workers
    making, fetch_s = (loader.in_workers if workers else loader.in_loop).of_one, None
    if making is not None:
        whole_s = workers * totals.active_s if workers else totals.asking_s
        fetch_s = max(making.cpu_s, whole_s / totals.batches - making.queued_s)
    receiving, cores = loader.in_loop.of_one if workers else None, usable_cores().usable
    return Evidence(
        config=loader.own,
        samples_per_s=totals.samples / max(totals.active_s, 1e-9),
        wait_share=totals.wait_share,
        cores=cores,
        cpu_share=loader.busy_s / (cores * loader.read_s) if loader.read_s else None,
        batch_size=totals.samples / totals.batches,
        step_s=totals.stepped_s / totals.batches,
        fetch_s=fetch_s,
        fetch_cpu_s=None if making is None else making.cpu_s,
        fetch_queued_s=None if making is None else making.queued_s,
        receive_queued_s=0.0 if receiving is None else receiving.queued_s,
        receive_s=None if receiving is None else receiving.cpu_s,
        starting_share=totals.starting_share,
        loader_share=totals.waited_s / max(script_s, 1e-9),
        batches=totals.batches,
        batch_bytes=loader.batch_bytes or 0,
        parent=loader.log.parent,
        on_accelerator=torch.get_device_module() is not torch.cpu and torch.get_device_module().is_initialized(),
    )


def _to_try(bottleneck: Finding, evidence: Evidence, kept: Finding | None, plan: Plan) -> Iterator[Finding]:
    """The command that tries other settings, where it could pay and is allowed to."""
    is_limited = any(row.said_by(bottleneck) for row in OTHER_SETTINGS_HELP)
    has_core = evidence.cores > 1 or not Bottleneck.CPU.said_by(bottleneck)
    if not is_limited or not has_core or (evidence.headroom or 0.0) < WORTH_TRYING:
        return
    if not evidence.config.num_workers and (plan.verb == "watch" or Kept.NO_CONSENT.said_by(kept)):
        yield Advice.RUN_WITH_WORKERS(command=plan.to_run(allow_workers=True))
    elif plan.verb == "watch":
        yield Advice.RUN(command=plan.to_run(allow_workers=False))


def _result_of(main: ScriptLoader, report: LoaderReport, loaders: dict[str, dict[str, Any]]) -> TuningResult:
    """What `-o` writes: the training loader's result, as its report has it, with the settings of all loaders."""
    own = TuningResult(best=main.own, status="partial", found_by="watch", baseline=main.own)
    return replace(
        own if main.told is None else main.told.result,
        batch_size=main.site.batch_size,
        wait_share=report.wait_share,
        seconds=round(report.seconds, 3),
        bottleneck=report.bottleneck,
        advice=report.advice,
        loaders=loaders,
    )


def _written(path: str, write: Callable[[str], None]) -> str:
    try:
        write(path)
    except Exception as error:
        return f"{path} was not written: {error}"
    return f"Written to {path}."
