"""What is told of a script's loaders at its end: a block for each, on stderr, so that stdout stays the script's own."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autotune_loader.diagnosis.units import bytes_text, counted, seconds_text, share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.scripts import ranks
from autotune_loader.scripts.loader import ScriptLoader
from autotune_loader.scripts.nothing import foreign_notes, say
from autotune_loader.scripts.session import Session
from autotune_loader.scripts.verdict import FEWEST_BATCHES, LoaderReport, told


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """What is known of a script's loaders."""

    verb: str
    seconds: float
    peak_memory_bytes: int
    """Of the process itself."""
    peak_child_memory_bytes: int | None
    """Of the largest process that it started and that has ended; None where no loader had workers."""
    peak_gpu_memory_bytes: int | None
    """Of its tensors on its current GPU; None without CUDA."""
    loaders: tuple[LoaderReport, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        memory = f"peak memory {bytes_text(self.peak_memory_bytes)}"
        if self.peak_child_memory_bytes:
            memory += f", largest child process {bytes_text(self.peak_child_memory_bytes)}"
        if self.peak_gpu_memory_bytes is not None:
            memory += f", on the GPU {bytes_text(self.peak_gpu_memory_bytes)}"
        loaders = counted(len(self.loaders), "loader")
        head = f"autotune-loader {self.verb}: {loaders} in {seconds_text(self.seconds)}; {memory}"
        return "\n\n".join([head, *map(str, self.loaders), *(["\n".join(self.notes)] if self.notes else [])])


def report_of(session: Session) -> ScriptReport:
    """What is known now."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seen = sorted((each for each in session.loaders if each.log.batches), key=lambda each: -each.log.active_s)
    has_workers = any(each.own.num_workers or each.config.num_workers for each in seen)
    return ScriptReport(
        verb=session.plan.verb,
        seconds=time.monotonic() - session.begun,
        peak_memory_bytes=own << 10,
        peak_child_memory_bytes=children << 10 if has_workers else None,
        peak_gpu_memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
        loaders=tuple(_report_of(each, session) for each in seen),
        notes=tuple(_notes(session)),
    )


def tell(session: Session, more: tuple[str, ...] = ()) -> None:
    """Print the report and write the files that were asked for; what cannot be written is said, not raised."""
    plan, notes = session.plan, list(more)
    if plan.folder is not None and session.ranks > 1:
        share = None if session.main is None else session.main.log.wait_share
        ranks.leave(plan.folder, session.rank, session.ranks, share)
    if session.rank:
        return
    if plan.folder is not None and session.ranks > 1:
        notes += filter(None, [ranks.sentence(ranks.gather(plan.folder, session.ranks), session.ranks)])
    report = report_of(session)
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable()  # what matplotlib has to tell would go to the script's log, and perhaps its stdout
        notes += [
            _written(session, path, write)
            for path, write in ((plan.output, TuningResult.save), (plan.page, TuningResult.save_html))
            if path
        ]
    report = replace(report, notes=(*report.notes, *notes))
    import msgspec

    text = msgspec.json.encode(report).decode() if plan.as_json else f"\n{report}"
    if plan.folder is None or plan.pid == os.getpid() or not Path(f"/proc/{plan.pid}/exe").exists():
        say(text)
        return
    # The script reads what its other processes print, perhaps: it tells of them at its own end.
    with contextlib.suppress(OSError):
        Path(plan.folder).mkdir(mode=0o700, exist_ok=True)
        Path(plan.folder, f"told-{os.getpid()}").write_text(text)


def _notes(session: Session) -> Iterator[str]:
    yield from foreign_notes()
    if session.is_waiting_too_long and session.main is not None:
        waits, most = share_text(session.main.log.wait_share), share_text(session.plan.most_waiting)
        yield f"{session.main.name} was waited for {waits} of its time, and --fail-if-wait allows {most}."
    if session.ranks > 1:
        yield f"These are the loaders of rank 0 of {session.ranks}."
    if session.stopped is not None:
        yield f"The script was asked to end, as by Ctrl-C: {session.stopped}."
    elif session.plan.verb == "tune":
        several = " It has several ranks, none of which is ended: autotune-loader run is for them."
        yield f"The script ended by itself before tuning was done.{several if session.ranks > 1 else ''}"


def _report_of(loader: ScriptLoader, session: Session) -> LoaderReport:
    log, (result, expected) = loader.log, loader.findings
    whole_s = sum(each.log.active_s for each in session.loaders)
    why_not, mend = loader.refusal
    known = LoaderReport(
        name=loader.name,
        contents=loader.site.contents,
        epochs=log.epochs,
        batches=log.batches,
        samples_per_s=log.samples / log.active_s if log.batches >= FEWEST_BATCHES and log.stepped_s else None,
        wait_share=log.wait_share,
        starting_share=log.starting_share,
        script_share=log.waited_s / max(whole_s, 1e-9),
        gpu_share=None,
        settings=loader.own.to_kwargs(),
        settings_now=loader.config.to_kwargs(),
        is_tuned=loader.tuned is not None and why_not is None,
        is_settled=loader.is_settled,
        why_watched=why_not,
        mend=mend,
        expected_settings=None if expected is None else expected[0].to_kwargs(),
        expected_speedup=None if expected is None else expected[1],
    )
    if result is not None:
        known = replace(
            known,
            speedup=None if loader.config == loader.own else result.speedup,
            binding="unclear" if result.bottleneck is None else result.bottleneck.kind,
            evidence=None if result.bottleneck is None else result.bottleneck.sentence,
            latest_wait_share=result.wait_share,
            advice=str(result.advice[0]) if result.advice else None,
        )
    return told(known, session.plan.script or "train.py")


def _written(session: Session, path: str, write: Any) -> str:
    main = session.main
    result = None if main is None else main.findings.result
    if result is None:
        return f"{path} was not written: the training was too short to say anything."
    others = {each.name: each.config.to_kwargs() for each in session.loaders}
    try:
        write(replace(result, loaders=others), path)
    except Exception as error:
        return f"{path} was not written: {error}"
    return f"Written to {path}."
