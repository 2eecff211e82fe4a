"""What is known of one loader, and the one step that follows from it: a table, first match first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from autotune_loader.diagnosis.advice import WORTH_S_TIME
from autotune_loader.diagnosis.units import counted, rate_text, ratio_text, share_text, times_text
from autotune_loader.live.prospects import LEAST_GAIN
from autotune_loader.values.statistics import Interval

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first one waits for workers, and the last has no step after it."""
LONG_START = 0.1
"""Share of the time in the starts of epochs from which on they are what the loop waits for."""
ALIKE = 0.05
"""Shares that differ by less are not told apart."""
LEAVE_IT = "leave the loader as it is"
KEEP_IT = "batches = iter(loader), once: next(iter(loader)) begins an epoch for each batch"


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
    binding: str = "unclear"
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


def told(known: LoaderReport, script: str = "train.py") -> LoaderReport:
    """The same with one verdict, and what follows from it: the first row of the table that holds."""
    share, starting, now = known.wait_share, known.starting_share, known.settings_now
    if known.batches < FEWEST_BATCHES:
        return replace(known, verdict=f"{_batches(known.batches)}: too few to say anything.", next_step=None)
    if share is None:
        return replace(
            known, verdict="No step could be timed: each epoch was left after its first batch.", next_step=KEEP_IT
        )
    waits = f"the loop waits for data {share_text(share)} of the time"
    most = share / max(1 - share, 1e-9)  # what a loader that costs nothing would gain
    step = f"The training step binds: {waits}."
    rest = share_text(known.script_share)
    hardly = f"This loader hardly counts: {waits}, which is {rest} of the time with all loaders."
    starts = f"The starts of epochs bind: they take {share_text(starting)} of the time; {waits}."
    gain = times_text(starting / max(1 - starting, 0.1))
    keep = f"persistent_workers=True: up to {gain} as fast, where workers need not see what the script changes"
    keeps = now.get("persistent_workers") or not now.get("num_workers")
    latest, then = known.latest_wait_share, _next_step(known, script)
    # The latest batches need not wait as all did.
    is_other = latest is not None and (known.binding == "step" or abs(latest - share) >= ALIKE)
    begins = known.binding == "start_up" and not known.is_tuned  # the figure of one start, where that of all is known
    is_unclear = known.evidence is None or known.binding == "unclear" or begins
    rows = (
        (most < LEAST_GAIN, step, LEAVE_IT),
        (known.script_share < LEAST_GAIN, hardly, LEAVE_IT),
        (starting >= max(LONG_START, 0 if begins else share / 2), starts, None if keeps else keep),
        (share < 2 * WORTH_S_TIME, step, f"{LEAVE_IT}: no settings could bring more than {share_text(most)}"),
        (is_unclear, f"The loader binds: {waits}; the latest batches do not show why.", then),
        (True, f"{'Lately: ' if is_other else ''}{known.evidence}", then),
    )
    verdict, next_step = next((verdict, next_step) for holds, verdict, next_step in rows if holds)
    return replace(known, verdict=verdict, next_step=next_step)


def _next_step(known: LoaderReport, script: str) -> str | None:
    if known.binding == "in_memory":
        return LEAVE_IT
    if known.mend is not None:
        return known.mend
    if known.is_tuned and not known.is_settled:
        return "train for longer: the script ended before it was known what other settings bring"
    settings, speedup = known.expected_settings, known.expected_speedup
    if known.is_tuned or settings is None or speedup is None or speedup.value < 1 + WORTH_S_TIME:
        return known.advice
    # Far beyond what ran, something that was never seen will bind first.
    far = f"more than {1 + 9.0:.0f} times" if speedup.value > 1 + 9.0 else ""
    own = f"yours to try, as {known.why_watched}"
    tries = f"autotune-loader run {script} tries it, where it changes no batch" if known.why_watched is None else own
    return f"{settings_text(settings)}: {far or ratio_text(speedup)} as fast is expected; {tries}"


def settings_text(kwargs: dict[str, Any]) -> str:
    """Arguments of DataLoader that say anything: "num_workers=2, prefetch_factor=4"."""
    shown = {name: value for name, value in kwargs.items() if value or name == "num_workers"}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "in_order" or value is not True)


def _batches(count: int) -> str:
    return f"{count:,} {'batch' if count == 1 else 'batches'}"
