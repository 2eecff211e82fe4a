"""What is told of a script's loaders at its end: a block for each, the one with most time first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune_loader import TuningResult
from autotune_loader.diagnosis import Advice, Caution, Finding, Job, Kept, judge_loops
from autotune_loader.machine.limits import usable_cores
from autotune_loader.report.script import LoaderReport, ScriptReport
from autotune_loader.watch.others import ProcessReport, leave
from autotune_loader.watch.run_plan import Plan, say
from autotune_loader.watch.session import Session
from autotune_loader.watch.watched import ScriptLoader

TURNS = 4
"""Each worker of a stream had its turn after so many batches for each; torch asks for two of each at first."""


def seen_of(session: Session) -> ProcessReport:
    """What is known now of the loaders that gave a batch: once, for the terminal and for the files."""
    for each in session.loaders:
        each.log.marks.settle(time.monotonic(), is_end=True)
        if (watch := each.watch()) is not None:
            watch.workers.gather()
    known, plan = session.known, session.plan
    device = torch.get_device_module()
    job = Job(
        active_s=sum(each.log.totals.active_s for each in known),
        cores=usable_cores().usable,
        on_accelerator=device is not torch.cpu and device.is_initialized(),
        to_tune=plan.to_run(allow_workers=False),
        to_allow=plan.to_run(allow_workers=True),
        is_tuned=plan.verb == "run",
    )
    reports = [_report_of(each, job) for each in known]
    main, report = max(zip(known, reports, strict=True), key=lambda both: both[1].seconds)
    return ProcessReport(
        rank=session.rank,
        ranks=session.ranks,
        report=ScriptReport(
            verb=session.plan.verb,
            torch=str(torch.__version__),
            seconds=time.monotonic() - session.begun,
            loaders=tuple(sorted(reports, key=lambda each: -each.seconds)),
            traces=tuple(trace for each in known if (trace := each.trace(each.name)) is not None),
        ),
        result=_result_of(main, report, {each.name: each.settings_now for each in reports}),
    )


def tell(seen: Sequence[ProcessReport], plan: Plan, *, flushes: bool = True) -> ScriptReport:
    """Print the report, write the files that were asked for, and return it; what cannot be written is said, not raised.

    Of the ranks of a job, rank 0 speaks; of a script's processes, the one that the command has started.
    """
    told = [each for each in seen if not each.rank]
    if (plan.is_told_elsewhere and leave(seen[0], str(plan.folder))) or not told:
        return seen[0].report
    main, report = max(told, key=lambda each: each.main.seconds), report_of(told)
    report = report.beside_ranks({each.rank: each.report for each in reversed(seen)})
    notes = [text.sentence for each in seen if (text := each.too_long(plan)) is not None][:1]
    notes += [] if main.ranks == 1 else [f"These are the loaders of rank 0 of {main.ranks}."]
    notes += [_written(plan.output, main.result.save)] if plan.output else []
    notes += [_written(plan.trace, report.save_trace)] if plan.trace else []
    report = replace(report, notes=tuple(notes))
    if plan.report:
        report = replace(report, notes=(*notes, _written(plan.report, report.save)))
    say(f"\n{report}", flushes=flushes)
    return report


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
    traces = tuple(trace for each in seen for trace in each.report.traces)
    return replace(longest, loaders=tuple(loaders.values()), traces=traces)


def _report_of(loader: ScriptLoader, job: Job) -> LoaderReport:
    totals, found, samples = loader.log.totals, loader.told, loader.epoch_samples
    kept = loader.kept if found is None else found.kept
    # Under `run`, the command that allows workers could do more where nothing else kept it from tuning.
    job = replace(job, is_tuned=job.is_tuned and not Kept.NO_CONSENT.said_by(kept))
    judged = judge_loops(loader, loader.name, job)
    bottleneck, advice, rate, wait = judged.bottleneck, judged.advice, judged.samples_per_s, totals.wait_share
    is_changed = found is not None and found.best != found.tuner.asked
    # Of the loops as a whole, some batches were made with other settings.
    if found is not None and found.has_tried and (result := found.result).rate is not None:
        bottleneck, advice, rate, wait = result.bottleneck, result.advice, result.rate.value, result.wait_share
    idle, shards = _of_stream(loader)
    return LoaderReport(
        name=loader.name,
        contents=loader.site.contents(next(iter(samples)) if len(samples) == 1 else None),
        epochs=totals.epochs,
        batches=totals.batches,
        seconds=totals.active_s,
        time=judged.account,
        samples_per_s=rate,
        wait_share=wait,
        gpu_utilization=loader.gpu_busy_s / loader.gpu_s if loader.gpu_s else None,
        settings=loader.own.to_kwargs(),
        settings_now=(loader.own if found is None else found.best).to_kwargs(),
        speedup=found.gain if is_changed else None,
        kept=kept,
        delivered=tuple(loader.delivered[each] for each in range(loader.own.num_workers)) if loader.delivered else None,
        idle_workers=idle,
        starts_anew=None if found is None else found.starts_anew,
        read_ahead=Caution.READ_AHEAD(thread=loader.reader) if loader.is_read_ahead else None,
        bottleneck=bottleneck,
        causes=() if loader.is_read_ahead else judged.causes,
        advice=(*shards, *advice),
    )


def _of_stream(loader: ScriptLoader) -> tuple[Finding | None, tuple[Finding, ...]]:
    """Whether workers of a stream had nothing to deliver, once each had its turn, and what to do."""
    workers, busy = loader.own.num_workers, len(loader.delivered)
    if not busy or busy >= workers or loader.delivered.total() < TURNS * workers:
        return None, ()
    return Caution.IDLE_WORKERS(idle=workers - busy, workers=workers), (Advice.SPREAD_SHARDS(busy=busy),)


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
