"""What is told of a script's loaders at its end: a block for each, the one with most time first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from autotune_loader import TuningResult
from autotune_loader.diagnosis import Advice, Bottleneck, Evidence, Finding, Kept, diagnose
from autotune_loader.machine.limits import usable_cores
from autotune_loader.report.script import LoaderReport, ScriptReport
from autotune_loader.watch.run_plan import Plan, say
from autotune_loader.watch.script_loader import FEWEST_BATCHES, ScriptLoader
from autotune_loader.watch.session import Session

WORTH_TRYING = 0.05
"""A gain below this, at most, is not worth another run."""
OTHER_SETTINGS_HELP = (Bottleneck.CPU, Bottleneck.STORAGE, Bottleneck.HAND_OVER, Bottleneck.UNCLEAR)
"""Where other workers may bring something."""


def report_of(session: Session) -> ScriptReport:
    """What is known now."""
    seen = [each for each in session.loaders if each.log.totals.batches]
    script_s = sum(each.log.totals.active_s for each in seen)
    loaders = [
        _report_of(each, script_s, session.plan) for each in sorted(seen, key=lambda each: -each.log.totals.active_s)
    ]
    return ScriptReport(
        verb=session.plan.verb,
        seconds=time.monotonic() - session.begun,
        loaders=tuple(loaders),
        notes=tuple(_notes(session)),
    )


def tell(session: Session) -> None:
    """Print the report and write the files that were asked for; what cannot be written is said, not raised.

    Of the ranks of a job, rank 0 speaks.
    """
    if session.rank:
        return
    plan, report = session.plan, report_of(session)
    notes = [_written(plan.output, _result_of(session).save)] if plan.output else []
    report = replace(report, notes=(*report.notes, *notes))
    if plan.report:
        failed = _written(plan.report, report.save)
        report = replace(report, notes=(*report.notes, failed))
    say(f"\n{report}")


def _notes(session: Session) -> Iterator[str]:
    if (main := session.main) is not None and session.is_waiting_too_long:
        yield f"{main.name}: {main}, and --fail-if-wait allows {(session.plan.most_waiting or 0.0) * 100:.0f} %."
    if session.ranks > 1:
        yield f"These are the loaders of rank 0 of {session.ranks}."


def _report_of(loader: ScriptLoader, script_s: float, plan: Plan) -> LoaderReport:
    totals, found = loader.log.totals, loader.found
    evidence = evidence_of(loader, script_s)
    bottleneck, advice = diagnose(evidence)
    if found is not None and found.config != loader.own and (result := found.result).bottleneck is not None:
        bottleneck, advice = result.bottleneck, result.advice
    kept = loader.kept if found is None else found.kept
    return LoaderReport(
        name=loader.name,
        contents=loader.site.contents,
        epochs=totals.epochs,
        batches=totals.batches,
        samples_per_s=evidence.samples_per_s if totals.batches >= FEWEST_BATCHES and totals.stepped_s else None,
        wait_share=totals.wait_share,
        settings=loader.own.to_kwargs(),
        settings_now=(loader.own if found is None else found.config).to_kwargs(),
        speedup=None if found is None or found.config == loader.own else found.gain,
        kept=kept,
        bottleneck=bottleneck,
        advice=(*_to_try(bottleneck, evidence, kept, plan), *advice),
    )


def evidence_of(loader: ScriptLoader, script_s: float) -> Evidence:
    """What was measured of a loader; `script_s` is the time with all loaders.

    Workers of torch's do not tell how long a batch takes them. Where the loop waits, they have no time to rest: a batch takes
    each of them the time in which so many batches come as there are workers. While a fetch waits for a core it waits for no
    data, so that time is left out.
    """
    totals, workers = loader.log.totals, loader.own.num_workers
    making, fetch_s = (loader.in_workers if workers else loader.in_loop).of_one, None
    if making is not None:
        whole_s = workers * totals.active_s if workers else totals.waited_s
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
        receive_s=None if receiving is None else receiving.cpu_s,
        starting_share=totals.starting_share,
        loader_share=totals.waited_s / max(script_s, 1e-9),
        batches=totals.batches,
        batch_bytes=0 if loader.shape is None else loader.shape.bytes,
        on_accelerator=torch.cuda.is_initialized(),
    )


def _to_try(bottleneck: Finding, evidence: Evidence, kept: Finding | None, plan: Plan) -> Iterator[Finding]:
    """The command that tries other settings, where it could pay and is allowed to."""
    is_limited = any(row.said_by(bottleneck) for row in OTHER_SETTINGS_HELP)
    has_core = evidence.cores > 1 or not Bottleneck.CPU.said_by(bottleneck)
    if not is_limited or not has_core or (evidence.headroom or 0.0) < WORTH_TRYING:
        return
    if not evidence.config.num_workers and (plan.verb == "watch" or Kept.NO_CONSENT.said_by(kept)):
        yield Advice.RUN_WITH_WORKERS(script=plan.script or "train.py")
    elif plan.verb == "watch":
        yield Advice.RUN(script=plan.script or "train.py")
    elif Kept.TOO_SHORT.said_by(kept):
        yield Advice.TRAIN_LONGER()


def _result_of(session: Session) -> TuningResult:
    """The training loader's result, with the settings of the script's other loaders."""
    main, loaders = session.main, {}
    assert main is not None
    for each in session.loaders:
        loaders[each.name] = (each.own if each.found is None else each.found.best).to_kwargs()
    if main.found is not None:
        found: TuningResult = main.found.result
        return replace(found, loaders=loaders)
    return TuningResult(
        best=main.own,
        status="partial",
        found_by="watch",
        baseline=main.own,
        batch_size=main.site.batch_size,
        wait_share=main.log.totals.wait_share,
        seconds=main.log.totals.active_s,
        loaders=loaders,
    )


def _written(path: str, write: Callable[[str], None]) -> str:
    try:
        write(path)
    except Exception as error:
        return f"{path} was not written: {error}"
    return f"Written to {path}."
