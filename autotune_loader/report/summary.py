"""Sentences of a result's summary: rates and speed-ups with their intervals."""

from __future__ import annotations

from autotune_loader.decision.stopping import StopReason
from autotune_loader.report.units import is_telling
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

# A speed-up is claimed in words only above this, and only when its interval lies above one.
WORTH_CLAIMING = 1.005


def why_it_ended(reason: StopReason | None) -> str:
    """Why no more configurations were tried."""
    because = {
        StopReason.CEILING: "the training step's own ceiling is reached",
        StopReason.CHOICE_SAFE: "nothing untried is worth a burst",
        StopReason.OUT_OF_BUDGET: "the rest of the budget is kept for the finals",
        StopReason.OUT_OF_TRIALS: "as many trials were run as max_trials allows",
        StopReason.SAMPLER_REPEATS: "the sampler repeats itself",
        StopReason.INTERRUPTED: "it was interrupted",
    }
    return f"Search ended because {because[reason] if reason is not None else 'it was asked to'}."


def counted_rounds(count: int) -> str:
    return f"{count} paired round" + ("" if count == 1 else "s")


def _rate_words(rate: Interval | None, unit: str = "samples/s") -> str:
    if rate is None:
        return "not measured"
    if not is_telling(rate):
        return f"about {rate.value:,.0f} {unit}, too few or too noisy bursts for an interval"
    return f"{rate.value:,.0f} {unit} ({rate.low:,.0f} to {rate.high:,.0f})"


def _speedup_sentence(best: LoaderConfig, baseline: LoaderConfig, speedup: Interval | None) -> str:
    whose = f"the baseline ({baseline})"
    if best == baseline:
        return f"That is {whose} itself: nothing else is worth its cost."
    if speedup is None:
        return ""
    interval = f"{speedup.low:.2f}x to {speedup.high:.2f}x over {speedup.count} paired rounds"
    if speedup.low > 1 and speedup.value > WORTH_CLAIMING:
        return f"It is {speedup.value:.2f}x as fast as {whose} ({interval})."
    return f"Against {whose} the difference is within noise ({interval})."
