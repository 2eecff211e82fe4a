"""What is known of one loader, and the one step that follows from it: a table, first match first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from autotune_loader.live.prospects import LEAST_GAIN
from autotune_loader.report.advice.steps import BELIEVABLE_GAIN, WORTH_S_TIME
from autotune_loader.report.units import counted, gain_words, rate_text, ratio_text, share_text
from autotune_loader.values.statistics import Interval

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first one waits for workers, and the last has no step after it."""
LONG_START = 0.1
"""Share of the time in the starts of epochs from which on they are what the loop waits for."""
ALIKE = 0.05
"""Shares that differ by less are not told apart."""
LEAVE_IT = "leave the loader as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """What is known of one loader; shares are of its training time, pauses apart."""

    name: str = ""
    """The line that makes it."""
    contents: str = ""
    epochs: int = 1
    batches: int
    samples_per_s: float | None = None
    """None where that time is no step long."""
    wait_share: float | None
    """The loop waited for data; None before there was a step."""
    starting_share: float = 0.0
    """Part of the wait that went into the start of epochs, where workers start."""
    script_share: float = 1.0
    """What the loop waited for this loader, as a share of the time with all loaders."""
    gpu_share: float | None = None
    """Anything ran on the process' GPU, whoever's, by NVML; None where that is not known."""
    settings: dict[str, Any] = field(default_factory=dict)
    """As the script has them."""
    settings_now: dict[str, Any] = field(default_factory=dict)
    speedup: Interval | None = None
    """How many times as fast the change made it, from blocks of batches in turns; None where there were none."""
    is_tuned: bool = False
    """Whether other settings could be tried."""
    is_settled: bool = False
    why_watched: str | None = None
    """Why no other number of workers was tried."""
    mend: str | None = None
    """What would allow it."""
    binding: str = "unknown"
    evidence: str | None = None
    """What the latest batches tell of the resource that binds; None where they are too few."""
    latest_wait_share: float | None = None
    """`wait_share` of these batches."""
    advice: str | None = None
    """The first step that they call for."""
    expected_settings: dict[str, Any] | None = None
    """Settings that are believed to be best."""
    expected_speedup: Interval | None = None
    """How many times as fast they would be."""
    verdict: str = ""
    next_step: str | None = None
    """None where none follows."""

    def __str__(self) -> str:
        epochs = f" in {counted(self.epochs, 'epoch')}" if self.epochs > 1 else ""
        seen = [f"{_batches(self.batches)}{epochs}"]
        if self.samples_per_s is not None:
            seen.append(f"{rate_text(self.samples_per_s).removesuffix('/s')} samples/s")
        if self.wait_share is not None:
            seen.append(f"the loop waits {share_text(self.wait_share)} of its time")
        if self.starting_share >= LEAST_GAIN:
            seen.append(f"{share_text(self.starting_share)} for epochs to start")
        if self.gpu_share is not None:
            seen.append(f"the GPU works {share_text(self.gpu_share)} of it")
        own, now = settings_text(self.settings), settings_text(self.settings_now)
        lines = [f"{self.name}  {self.contents}", f"  {', '.join(seen)}", f"  settings: {own}"]
        if now != own:
            lines.append(f"  now: {now}{'' if self.speedup is None else f': {ratio_text(self.speedup)} as fast'}")
        if self.why_watched is not None:
            lines.append(f"  not changed: {self.why_watched}")
        lines.append(f"  {self.verdict}")
        return "\n".join(lines if self.next_step is None else [*lines, f"  next: {self.next_step}"])


def judged(known: LoaderReport, script: str = "train.py") -> LoaderReport:
    """The same with one verdict, and what follows from it."""
    verdict, next_step = _told(known, script)
    return replace(known, verdict=verdict, next_step=next_step)


def _told(known: LoaderReport, script: str) -> tuple[str, str | None]:
    share, starting = known.wait_share, known.starting_share
    if share is None or known.batches < FEWEST_BATCHES:
        return f"{_batches(known.batches)}: too few to say anything.", None
    waits = f"the loop waits for data {share_text(share)} of the time"
    if share / max(1 - share, 1e-9) < LEAST_GAIN:
        return f"The training step binds: {waits}.", LEAVE_IT
    if known.script_share < LEAST_GAIN:
        rest = share_text(known.script_share)
        return f"This loader hardly counts: {waits}, which is {rest} of the time with all loaders.", LEAVE_IT
    if starting >= max(LONG_START, share / 2):
        starts = f"The starts of epochs bind: they take {share_text(starting)} of the time; {waits}."
        gain, now = gain_words(starting / max(1 - starting, 0.1)), known.settings_now
        keep = f"persistent_workers=True: up to {gain}, where workers need not see what the script changes"
        return starts, keep if now.get("num_workers") and not now.get("persistent_workers") else None
    if share < 2 * WORTH_S_TIME:
        most = share_text(share / (1 - share))
        return f"The training step binds: {waits}.", f"{LEAVE_IT}: no settings could bring more than {most}"
    if known.evidence is None:
        return f"The loader binds: {waits}; why cannot be told from what was seen.", _next_step(known, script)
    if known.binding in ("unknown", "step"):  # the latest batches need not wait as all did
        return f"The loader binds: {waits}; the latest batches do not show why.", _next_step(known, script)
    latest = known.latest_wait_share
    lately = "" if latest is None or abs(latest - share) < ALIKE else "Lately: "
    return f"{lately}{known.evidence}", _next_step(known, script)


def _next_step(known: LoaderReport, script: str) -> str | None:
    if known.binding == "in_memory":
        return LEAVE_IT
    if known.mend is not None:
        return known.mend
    if known.is_tuned and not known.is_settled:
        return "train for longer: other settings were still being tried when the script ended"
    settings, speedup = known.expected_settings, known.expected_speedup
    if known.is_tuned or settings is None or speedup is None or speedup.value < 1 + WORTH_S_TIME:
        return known.advice
    # Far beyond what ran, something that was never seen will bind first.
    far = f"more than {1 + BELIEVABLE_GAIN:.0f} times" if speedup.value > 1 + BELIEVABLE_GAIN else ""
    step = f"{settings_text(settings)}: {far or ratio_text(speedup)} as fast is expected"
    if known.why_watched is not None:
        return f"{step}; yours to try, as {known.why_watched}"
    return f"{step}; autotune-loader run {script} tries it while it trains"


def settings_text(kwargs: dict[str, Any]) -> str:
    """Arguments of DataLoader that say anything: "num_workers=2, prefetch_factor=4"."""
    shown = {name: value for name, value in kwargs.items() if value or name == "num_workers"}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "in_order" or value is not True)


def _batches(count: int) -> str:
    return f"{count:,} {'batch' if count == 1 else 'batches'}"
