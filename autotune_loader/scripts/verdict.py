"""From what is known of a loader to one sentence and the one step that follows from it: a table, first match first."""

from __future__ import annotations

from dataclasses import dataclass

from autotune_loader.live.tuner import LEAST_GAIN
from autotune_loader.report.advice.steps import BELIEVABLE_GAIN, WORTH_S_TIME
from autotune_loader.report.advice.verdict import gain_words
from autotune_loader.report.units import share_text
from autotune_loader.results.loader_file import Verdict
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first one waits for workers, and the last has no step after it."""
LONG_START = 0.1
"""Share of the time in the starts of epochs from which on they are what the loop waits for."""
ALIKE = 0.05
"""Shares that differ by less are not told apart."""
TORCH_DEFAULTS = LoaderConfig()
LEAVE_IT = "leave the loader as it is"
Told = tuple[str, str | None]
"""Verdict and next step; None where none follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a verdict rests on."""

    batches: int
    wait_share: float | None
    """Share of the loader's time in which the loop waited; None before there was a step."""
    script_share: float = 1.0
    """What the loop waited for this loader, as a share of the time with all loaders."""
    starting_share: float = 0.0
    """Part of `wait_share` that went into the starts of epochs."""
    now: LoaderConfig = TORCH_DEFAULTS
    is_tuned: bool = False
    """Whether other settings could be tried."""
    is_settled: bool = False
    why_not: str | None = None
    """Why no other number of workers was tried."""
    mend: str | None = None
    """What would allow it."""
    binding: Verdict | None = None
    """What the latest batches tell of the resource that binds; None where they are too few."""
    latest_share: float | None = None
    """`wait_share` of these batches."""
    advice: str | None = None
    """The first step that they call for."""
    expected: tuple[LoaderConfig, Interval] | None = None
    """The settings that are believed to be best, and what they would bring, relatively."""
    script: str = "train.py"


def told(facts: Facts) -> Told:
    """One verdict, and what follows from it."""
    share, count = facts.wait_share, facts.batches
    if share is None or count < FEWEST_BATCHES:
        return f"{count} {'batch' if count == 1 else 'batches'}: too few to say anything.", None
    waits = f"the loop waits for data {share_text(share)} of the time"
    if share / max(1 - share, 1e-9) < LEAST_GAIN:
        return f"The training step binds: {waits}.", LEAVE_IT
    if facts.script_share < LEAST_GAIN:
        rest = share_text(facts.script_share)
        return f"This loader hardly counts: {waits}, which is {rest} of the time with all loaders.", LEAVE_IT
    if facts.starting_share >= max(LONG_START, share / 2):
        starts = f"The starts of epochs bind: they take {share_text(facts.starting_share)} of the time; {waits}."
        gain = gain_words(facts.starting_share / max(1 - facts.starting_share, 0.1))
        keep = f"persistent_workers=True: up to {gain}, where workers need not see what the script changes"
        return starts, keep if facts.now.num_workers and not facts.now.persistent_workers else None
    if share < 2 * WORTH_S_TIME:
        most = share_text(share / (1 - share))
        return f"The training step binds: {waits}.", f"{LEAVE_IT}: no settings could bring more than {most}"
    return _what_binds(facts, waits), _next_step(facts)


def _what_binds(facts: Facts, waits: str) -> str:
    if facts.binding is None:
        return f"The loader binds: {waits}; why cannot be told from what was seen."
    if facts.binding.binding in ("unknown", "step"):  # the latest batches need not wait as all did
        return f"The loader binds: {waits}; the latest batches do not show why."
    is_as_ever = facts.latest_share is None or abs(facts.latest_share - (facts.wait_share or 0.0)) < ALIKE
    return facts.binding.sentence if is_as_ever else f"Lately: {facts.binding.sentence}"


def _next_step(facts: Facts) -> str | None:
    if facts.binding is not None and facts.binding.binding == "in_memory":
        return LEAVE_IT
    if facts.mend is not None:
        return facts.mend
    if facts.is_tuned and not facts.is_settled:
        return "train for longer: other settings were still being tried when the script ended"
    if facts.is_tuned or facts.expected is None or facts.expected[1].value < WORTH_S_TIME:
        return facts.advice
    config, gain = facts.expected
    # Far beyond what ran, something that was never seen will bind first.
    is_far = gain.value > BELIEVABLE_GAIN
    rise = f"more than {1 + BELIEVABLE_GAIN:.0f} times the rate" if is_far else gain_text(gain)
    step = f"{settings_text(config)}: {rise} expected"
    if facts.why_not is not None:
        return f"{step}; yours to try, as {facts.why_not}"
    return f"{step}; autotune-loader run {facts.script} tries it while it trains"


def settings_text(config: LoaderConfig) -> str:
    """Arguments of DataLoader that say anything: "num_workers=2, prefetch_factor=4"."""
    kwargs = config.to_kwargs()
    shown = {name: value for name, value in kwargs.items() if value or name == "num_workers"}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "in_order" or value is not True)


def gain_text(gain: Interval) -> str:
    """A relative gain with its interval: "+83 % (+75 to +92 %)", "3.2 times the rate (3.0 to 3.4)"."""
    if gain.value >= 1:
        limits = f" ({1 + gain.low:.1f} to {1 + gain.high:.1f})" if gain.is_telling else ""
        return f"{1 + gain.value:.1f} times the rate{limits}"
    limits = f" ({gain.low * 100:+.0f} to {gain.high * 100:+.0f} %)" if gain.is_telling else ""
    return f"{gain.value * 100:+.0f} %{limits}"
