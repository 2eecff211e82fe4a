"""Sentences of a result's summary: rates and speed-ups with their intervals."""

from __future__ import annotations

from autotune_loader.decision.race import MIN_ROUNDS, RaceOutcome
from autotune_loader.decision.stopping import StopReason
from autotune_loader.report.units import counted, faster_words, number_text
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT, MAX_DISCARDED_SHARE, Interval

UNDECIDED = "Not decided"
"""How a summary begins whose choice is a guess."""
NOTHING_COMPARED = "the budget ended before a second configuration could be measured; a larger budget would decide it"


def why_it_ended(reason: StopReason | None) -> str:
    """Why no more configurations were tried."""
    because = {
        StopReason.CEILING: "the bursts were as fast as the training step alone had been",
        StopReason.CHOICE_SAFE: "nothing untried is worth a burst",
        StopReason.OUT_OF_BUDGET: "the rest of the budget is kept for the finals",
        StopReason.OUT_OF_TRIALS: "as many trials were run as max_trials allows",
        StopReason.SAMPLER_REPEATS: "the sampler repeats itself",
        StopReason.INTERRUPTED: "it was interrupted",
    }
    return f"Search ended because {because[reason] if reason is not None else 'it was asked to'}."


def why_undecided(outcome: RaceOutcome | None, tolerance: float) -> str | None:
    """Why the paired rounds do not decide, and what would decide it; None where they do.

    Args:
        outcome: of the rounds; None where none could be completed.
        tolerance: relative difference that counts as equally fast.
    """
    if outcome is None:
        return "no paired round fitted into the budget; a larger budget would decide it"
    if outcome.at_ceiling or len({config.key() for config in outcome.configs}) < 2:
        return None
    count = len(outcome.rounds)
    busy = sum((each.foreign_cpu_share or 0.0) > FOREIGN_CPU_LIMIT for each in outcome.rounds)
    if busy > MAX_DISCARDED_SHARE * count:
        quiet = "tuning again while the machine is quiet would decide it"
        return f"other processes kept the cores busy in {busy} of {counted(count, 'paired round')}; {quiet}"
    if count < MIN_ROUNDS:
        return f"only {counted(count, 'paired round')} fitted into the budget; a larger budget would decide it"
    if outcome.expected_loss > tolerance:
        return (
            f"after {counted(count, 'paired round')} something else may be faster by more than the tolerance "
            f"({outcome.expected_loss:.1%} are expected to be lost); a larger budget would decide it"
        )
    return None


def rate_words(rate: Interval | None, unit: str = "samples/s") -> str:
    if rate is None:
        return "not measured"
    if not rate.is_telling:
        return f"about {number_text(rate.value)} {unit}, too few or too noisy bursts for an interval"
    return f"{number_text(rate.value)} {unit} ({number_text(rate.low)} to {number_text(rate.high)})"


def speedup_sentence(
    best: LoaderConfig, baseline: LoaderConfig, speedup: Interval | None, *, is_decided: bool = True
) -> str:
    if best == baseline:
        found = "nothing else is worth its cost" if is_decided else "nothing else was shown to be worth its cost"
        return f"That is the configuration before tuning: {found}."
    return "" if speedup is None else f"{faster_words('It', speedup, f'{baseline} (before tuning)')}."
