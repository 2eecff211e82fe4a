"""What `watch` and `run` tell of a script: one record a loader, and the text of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

from autotune_loader.diagnosis import Account, Advice, Cause, NamedCause, slow_rank
from autotune_loader.report.perfetto import write_trace
from autotune_loader.report.text import wrapped
from autotune_loader.results.result import Finding
from autotune_loader.values import Interval, LoaderTrace, units, write_json
from autotune_loader.version import __version__

SCHEMA_VERSION = 1
"""Of the report's file: a key that is there in one report is there in all."""
MOST_SHOWN = 12
"""Loaders that are printed; a script that makes one for each client or fold has hundreds."""
SMALLEST_PART = 0.01
"""Smaller parts of the time are not printed."""
SAID_APART = (Advice.FORKSERVER.kind, Advice.FORKSERVER_BY_AUTOLOADER.kind)
"""Advice that is printed whatever limits the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """What is known of one loader; shares are of its training time without pauses."""

    name: str
    """The line that makes it."""
    contents: str
    epochs: int
    batches: int
    seconds: float = 0.0
    """Of training: waiting and steps."""
    time: Account
    """Where the seconds of its loops went: `wall` and its parts."""
    samples_per_s: float | None
    """With the settings now, where their effect was measured; None where no step was timed."""
    wait_share: float | None
    """Share of the time in which the loop waited for data, with the same settings; None before there was a step."""
    gpu_utilization: float | None = None
    """Share of the time, 0 to 1, in which any kernel of any process ran on the GPU, as NVML tells it."""
    settings: dict[str, Any]
    """Those of the script."""
    settings_now: dict[str, Any]
    speedup: Interval | None = None
    """Rate now over the rate with the script's settings, from blocks of batches in turns; None where there were none."""
    kept: Finding | None = None
    """Why the number of workers did not change."""
    delivered: tuple[int, ...] | None = None
    """Batches of a stream by the worker that made them."""
    idle_workers: Finding | None = None
    """Said where workers of a stream had nothing to deliver."""
    read_ahead: Finding | None = None
    """Said where a thread takes the batches, so that waiting and steps are the thread's."""
    starts_anew: Finding | None = None
    """Said where workers start as their start method does it, and not as clones."""
    processes: int = 1
    """Number of processes that have this loader; the figures are of the one with most time."""
    bottleneck: Finding
    causes: tuple[NamedCause, ...] = ()
    """Why it costs time or memory, the largest first; each says what to do about it."""
    advice: tuple[Finding, ...] = ()
    """What to do, the best first."""

    def __str__(self) -> str:
        epochs = f" in {units.counted(self.epochs, 'epoch')}" if self.epochs > 1 else ""
        seen = [f"{units.counted(self.batches, 'batch')}{epochs}"]
        if self.samples_per_s is not None:
            is_new = "now " if self.settings_now != self.settings else ""
            seen.append(f"{is_new}{units.number_text(self.samples_per_s)} samples/s")
        if self.wait_share is not None:
            seen.append(f"waits for data {units.share_text(self.wait_share)} of the time")
        if self.gpu_utilization is not None:
            seen.append(f"GPU {units.share_text(self.gpu_utilization)} busy (NVML)")
        own, now = settings_text(self.settings), settings_text(self.settings_now)
        told = (
            [] if self.samples_per_s is None or self.read_ahead is not None else account_lines(self.time, self.epochs)
        )
        if own != now:  # what could be won with the settings now is told below
            told = [line.replace(":", ", all settings:", 1) for line in told[1:]]
        lines = [f"{self.name}  {self.contents}", *map("  {}".format, told)]
        lines += [f"  {', '.join(seen)}", f"  settings: {own}"]
        if self.processes > 1:
            lines.insert(1, f"  in {self.processes} processes; figures are from the process that trained longest")
        if now != own:
            lines.append(f"  now: {now}{'' if self.speedup is None else f': {self.speedup.as_gain()}'}")
        elif self.kept is not None:
            lines.append(f"  not changed: {self.kept}")
        lines += [f"  {each}" for each in (self.read_ahead, self.idle_workers, self.starts_anew) if each is not None]
        if not any(each.kind == Cause.TRAINING_MEMORY.kind for each in self.causes):
            lines += [f"  {each}" for each in self.advice if each.kind in SAID_APART]
        lines.append(f"  {self.bottleneck}")
        for cause in self.causes:
            lines += [f"  cause: {cause.sentence}", f"  next: {cause.advice}"]
        if not self.causes:
            lines += [f"  next: {step}" for step in [each for each in self.advice if each.kind not in SAID_APART][:1]]
        return "\n".join(wrapped(line, indent="    ") for line in lines)


def account_lines(time: Account, epochs: int) -> list[str]:
    """What training could win, and where the rest of the time goes, in seconds an epoch."""
    au = time.accelerator_utilization
    if au is None or not epochs:
        return []
    per = "" if epochs == 1 else " per epoch"
    waiting, wall = (units.seconds_text(each / epochs) for each in (time.waiting, time.wall))
    shown = {each.name: getattr(time, each.name) / epochs for each in fields(time)}
    parts = [
        f"{name.replace('_', ' ')} {units.seconds_text(seconds)}"
        for name, seconds in sorted(shown.items(), key=lambda part: -part[1])
        if seconds >= SMALLEST_PART * time.wall / epochs
    ]
    return [
        f"Training could win {waiting} of {wall}{per} (accelerator utilization {units.share_text(au)}).",
        f"seconds{per}: {', '.join(parts)}",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """What `watch`, `run` and `Hook.report` say of a script's loaders; `str(report)` is the text that a terminal shows.

    `save(path)` writes it as JSON, whose keys are these names, with `schema_version` before them.
    """

    verb: str
    """`watch` or `run`."""
    version: str = __version__
    """Of autotune_loader."""
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    """When the report was made: ISO 8601, UTC."""
    host: str = field(default_factory=platform.node)
    python: str = field(default_factory=platform.python_version)
    torch: str | None = None
    """Versions of Python and of torch."""
    seconds: float
    """Since the first loader was iterated."""
    loaders: tuple[LoaderReport, ...]
    """Those that gave a batch, the one with most time first."""
    notes: tuple[str, ...] = ()
    """Which files were written; what else there is to say."""
    traces: tuple[LoaderTrace, ...] = field(default=(), repr=False)
    """Of each loader, where they were asked for; the file of the report has none."""

    def __str__(self) -> str:
        loaders = units.counted(len(self.loaders), "loader")
        head = f"autotune-loader {self.verb}: {loaders} in {units.seconds_text(self.seconds)}"
        blocks = [head, *map(str, self.loaders[:MOST_SHOWN])]
        if (more := len(self.loaders) - MOST_SHOWN) > 0:
            blocks.append(
                f"{units.counted(more, 'loader')} more, each with less time; use --json FILE for all of them."
            )
        return "\n\n".join([*blocks, *(["\n".join(self.notes)] if self.notes else [])])

    def beside_ranks(self, ranks: Mapping[int, ScriptReport]) -> ScriptReport:
        """The same with the rank that others wait for; `ranks` are the reports of all of a job's, this one among them."""
        loaders = list(self.loaders)
        for number, loader in enumerate(loaders):
            alike = [each for _, report in sorted(ranks.items()) for each in report.loaders if each.name == loader.name]
            if sorted(ranks) == list(range(len(alike))):
                told = [(each.time, str(each.bottleneck)) for each in alike]
                if (found := slow_rank(loader.name, told)) is not None:
                    time = loader.time.beside(account for account, _ in told)
                    loaders[number] = replace(loader, time=time, causes=(found, *loader.causes))
        return replace(self, loaders=tuple(loaders))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, without traces."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "traces"}
        write_json({"schema_version": SCHEMA_VERSION, **told}, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the traces for https://ui.perfetto.dev."""
        write_trace(path, self.traces)


def settings_text(kwargs: dict[str, Any]) -> str:
    """Arguments of DataLoader that say anything: "num_workers=2, prefetch_factor=4"."""
    shown = {name: value for name, value in kwargs.items() if value or name == "num_workers"}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "in_order" or value is not True)
