"""What is told of a script's loaders at its end: a block for each, on stderr, so that stdout stays the script's own."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autotune_loader.decision.selection import choose
from autotune_loader.live.result import NOTHING
from autotune_loader.live.tuner import LEAST_GAIN, TOLERANCE
from autotune_loader.report.advice.steps import BELIEVABLE_GAIN, WORTH_S_TIME
from autotune_loader.report.units import bytes_text, counted, rate_text, seconds_text, share_text
from autotune_loader.results.loader_file import Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.scripts.nothing import foreign_notes
from autotune_loader.scripts.plan import Plan
from autotune_loader.scripts.session import Session
from autotune_loader.scripts.site import Site
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Z_95, Interval

SAME = 0.02
"""Gains below this are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """What is known of one loader."""

    name: str
    """The line that makes it."""
    contents: str
    epochs: int
    batches: int
    samples_per_s: float | None
    """Over all its training time; pauses apart."""
    wait_share: float | None
    """Share of that time in which the loop waited for data."""
    starting_share: float
    """Share of it that is part of the wait and went into the start of epochs, where workers start."""
    gpu_share: float | None
    """Share of it in which anything ran on the process' GPU, whoever's, by NVML; None where that is not known."""
    settings: dict[str, Any]
    """As the script has them."""
    settings_now: dict[str, Any]
    gain: Interval | None
    """What the change brought, relatively, from blocks of batches."""
    why_watched: str | None
    binding: str
    verdict: str
    next_step: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """What is known of a script's loaders."""

    verb: str
    seconds: float
    peak_memory_bytes: int
    """Of the process itself."""
    peak_child_memory_bytes: int
    """Of the largest process that it started and that has ended."""
    peak_gpu_memory_bytes: int | None
    """Of its tensors on its current GPU; None without CUDA."""
    loaders: tuple[LoaderReport, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        memory = f"peak memory {bytes_text(self.peak_memory_bytes)}"
        if self.peak_child_memory_bytes:
            memory += f", largest worker {bytes_text(self.peak_child_memory_bytes)}"
        if self.peak_gpu_memory_bytes is not None:
            memory += f", on the GPU {bytes_text(self.peak_gpu_memory_bytes)}"
        loaders = counted(len(self.loaders), "loader")
        lines = [f"autotune-loader {self.verb}: {loaders} in {seconds_text(self.seconds)}; {memory}"]
        for each in self.loaders:
            lines += ["", *_block(each)]
        return "\n".join([*lines, *([""] if self.loaders and self.notes else []), *self.notes])


def report_of(session: Session) -> ScriptReport:
    """What is known now."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    sites = [site for site in session.sites if site.tally.batches]
    return ScriptReport(
        verb=session.plan.verb,
        seconds=time.monotonic() - session.begun,
        peak_memory_bytes=own << 10,
        peak_child_memory_bytes=children << 10,
        peak_gpu_memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
        loaders=tuple(_told(site, session.plan) for site in sorted(sites, key=lambda site: -site.tally.active_s)),
        notes=tuple(_notes(session, sites)),
    )


def result_of(session: Session) -> TuningResult | None:
    """The training loader's result, with the settings of the others; None where it is not known yet."""
    main = session.main
    result = None if main is None else main.result()
    if result is None:
        return None
    return replace(result, loaders={site.name: site.config.to_kwargs() for site in session.sites})


def tell(session: Session, more: tuple[str, ...] = ()) -> None:
    """Print the report and write the files that were asked for; what cannot be written is said, not raised."""
    plan, report = session.plan, report_of(session)
    notes = [*report.notes, *more]
    if plan.output or plan.page:
        result = result_of(session)
        for path, write in ((plan.output, TuningResult.save), (plan.page, _save_page)):
            if path is None:
                continue
            if result is None:
                notes.append(f"{path} was not written: the training was too short to say anything.")
                continue
            try:
                write(result, path)
                notes.append(f"Written to {path}.")
            except Exception as error:
                notes.append(f"{path} was not written: {error}")
    report = replace(report, notes=tuple(notes))
    with contextlib.suppress(OSError, ValueError):  # a stream that is closed already
        text = _json(report) if plan.as_json else f"\n{report}"
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    if plan.told is not None:
        with contextlib.suppress(OSError), Path(plan.told).open("a") as told:
            told.write(f"{os.getpid()}\n")


def is_waiting_too_long(session: Session) -> bool:
    """Whether the training loader was waited for longer than was allowed."""
    most, main = session.plan.most_waiting, session.main
    share = None if main is None else main.tally.wait_share
    return most is not None and share is not None and share > most


def _notes(session: Session, sites: list[Site]) -> Iterator[str]:
    yield from foreign_notes()
    if is_waiting_too_long(session) and session.main is not None:
        waits, most = share_text(session.main.tally.wait_share), share_text(session.plan.most_waiting)
        yield f"{session.main.name} was waited for {waits} of its time, and --fail-if-wait allows {most}."
    if session.ranks > 1:
        yield f"These are the loaders of rank 0 of {session.ranks}."
    if session.stopped is not None:
        yield f"The script was ended as by Ctrl-C: {session.stopped}."
    elif session.plan.verb == "tune" and sites:
        why = (
            " It has several ranks, none of which is ended: autotune-loader run is for them."
            if session.ranks > 1
            else ""
        )
        yield f"The script ended by itself before tuning was done.{why}"


def _told(site: Site, plan: Plan) -> LoaderReport:
    tally, result = site.tally, site.result()
    verdict = None if result is None else result.verdict
    return LoaderReport(
        name=site.name,
        contents=str(site.contents),
        epochs=tally.epochs,
        batches=tally.batches,
        samples_per_s=tally.samples / tally.active_s if tally.active_s else None,
        wait_share=tally.wait_share,
        starting_share=tally.starting_share,
        gpu_share=tally.gpu.share,
        settings=site.own.to_kwargs(),
        settings_now=site.config.to_kwargs(),
        gain=_gain(result) if _is_measured_change(site) else None,
        why_watched=site.why_not if plan.verb != "watch" else None,
        binding="unknown" if verdict is None else verdict.binding,
        verdict=_seen_from_outside(site) if verdict is None else _lately(verdict),
        next_step=_next_step(site, result, plan.script),
    )


def _lately(verdict: Verdict) -> str:
    """A verdict is by the latest block, while the figures above it are of all the time."""
    return verdict.sentence if verdict == NOTHING else f"Lately: {verdict.sentence}"


def _seen_from_outside(site: Site) -> str:
    share = site.tally.wait_share
    if site.state is not None or share is None:
        return "The training was too short to say what binds."
    if share < 2 * WORTH_S_TIME:
        return f"The training step binds: the loop waits for data {share_text(share)} of the time."
    return "The loader binds; what in it cannot be told, as its batches were seen from outside only."


def _is_measured_change(site: Site) -> bool:
    """Whether it began with the script's own settings and has others now."""
    own = site.own.key()
    return site.tuning is not None and site.tuning.job.start.key() == own != site.config.key()


def _gain(result: TuningResult | None) -> Interval | None:
    """Rate now over rate at the start, minus one."""
    if result is None or result.measured.samples_per_s is None or result.measured.baseline_samples_per_s is None:
        return None
    now, then = result.measured.samples_per_s, result.measured.baseline_samples_per_s
    return Interval(
        value=now.value / then.value - 1,
        low=now.low / then.high - 1 if then.high > 0 else -math.inf,
        high=now.high / then.low - 1 if then.low > 0 else math.inf,
        count=min(now.count, then.count),
    )


def expected(site: Site) -> tuple[LoaderConfig, Interval] | None:
    """The configuration that is believed to be best, and its rate over that of what runs, minus one; None if unknown."""
    beliefs = None if site.tuning is None else site.tuning.tuner.beliefs
    posterior = None if beliefs is None else beliefs.posterior()
    if beliefs is None or posterior is None or site.config.key() not in posterior.configs:
        return None
    best, _ = choose(posterior, beliefs.space, TOLERANCE)
    mean, sd = posterior.ratio(posterior.configs.index(best), posterior.configs.index(site.config.key()))
    low, value, high = (math.exp(mean + z * sd) - 1 for z in (-Z_95, 0.0, Z_95))
    return best, Interval(value=value, low=low, high=high, count=len(beliefs.log))


def _next_step(site: Site, result: TuningResult | None, script: str | None) -> str | None:
    share = site.tally.wait_share or 0.0
    if share / max(1 - share, 1e-9) < LEAST_GAIN:
        return "leave the loader as it is; the loop hardly waits for it"
    if site.is_tuned and site.tuning is not None and not site.tuning.tuner.is_settled:
        return "train for longer: it was still being tuned when the script ended"
    needs_no_workers = result is not None and result.verdict.binding == "in_memory"
    found = None if site.is_tuned or needs_no_workers else expected(site)
    if found is not None and found[1].value >= WORTH_S_TIME:
        config, gain = found
        # Far beyond what ran, something that was never seen will bind first.
        rise = (
            _gain_text(gain) if gain.value <= BELIEVABLE_GAIN else f"more than {1 + BELIEVABLE_GAIN:.0f} times the rate"
        )
        told = f"{_settings_text(config.to_kwargs())}: {rise} expected"
        if site.why_not is not None:
            return f"{told}; yours to try, as {site.why_not}"
        return f"{told}; autotune-loader run {script or 'train.py'} tries it while it trains"
    return str(result.advice[0]) if result is not None and result.advice else None


def _block(loader: LoaderReport) -> Iterator[str]:
    rate, share = rate_text(loader.samples_per_s), share_text(loader.wait_share)
    epochs = f" in {counted(loader.epochs, 'epoch')}" if loader.epochs > 1 else ""
    batches = f"{loader.batches:,} {'batch' if loader.batches == 1 else 'batches'}"
    yield f"{loader.name}  {loader.contents}"
    gpu = "" if loader.gpu_share is None else f", and the GPU works {share_text(loader.gpu_share)} of it"
    starts = f", {share_text(loader.starting_share)} for epochs to start" if loader.starting_share >= LEAST_GAIN else ""
    yield f"  {batches}{epochs}, {rate.removesuffix('/s')} samples/s; the loop waits {share} of its time{starts}{gpu}"
    yield f"  settings: {_settings_text(loader.settings)}"
    if loader.settings_now != loader.settings:
        brought = "" if loader.gain is None else f": {_gain_text(loader.gain)}"
        yield f"  now: {_settings_text(loader.settings_now)}{brought}"
    if loader.why_watched is not None:
        yield f"  watched, not tuned: {loader.why_watched}"
    yield f"  {loader.verdict}"
    if loader.next_step is not None:
        yield f"  next: {loader.next_step}"


def _settings_text(kwargs: dict[str, Any]) -> str:
    shown = {name: value for name, value in kwargs.items() if value or name == "num_workers"}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "in_order" or value is not True)


def _gain_text(gain: Interval) -> str:
    if abs(gain.value) < SAME:
        return "as fast as before"
    if gain.value >= 1:
        limits = f" ({1 + gain.low:.1f} to {1 + gain.high:.1f})" if gain.is_telling else ""
        return f"{1 + gain.value:.1f} times the rate{limits}"
    limits = f" ({gain.low * 100:+.0f} to {gain.high * 100:+.0f} %)" if gain.is_telling else ""
    return f"{gain.value * 100:+.0f} %{limits}"


def _json(report: ScriptReport) -> str:
    import msgspec

    return msgspec.json.encode(report).decode()


def _save_page(result: TuningResult, path: str) -> None:
    from autotune_loader.report.page import render_html

    Path(path).write_text(render_html(result), encoding="utf-8")
