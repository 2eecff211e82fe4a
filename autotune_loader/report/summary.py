"""Sentences of a result's summary and its warnings."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_loader.decision.race import MIN_ROUNDS, RaceOutcome
from autotune_loader.decision.stopping import StopReason
from autotune_loader.report.units import counted, faster_words, number_text
from autotune_loader.results.loader_file import Reused
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT, MAX_DISCARDED_SHARE, Interval
from autotune_loader.values.trial import Trial

UNDECIDED = "Not decided"
"""How a summary begins whose choice is a guess."""
INTERRUPTED = "Interrupted: this is the best state so far."
NOTHING_MEASURED = "Nothing was measured, so nothing can be said."
FALLBACK = "No configuration worked; torch's defaults are given as a fallback."
SHORT_EPOCHS = "Epochs are short, so the finals ran whole ones: their rates include start-up and the gaps between."
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


def told(*sentences: str) -> tuple[str, ...]:
    """A summary of those that say anything."""
    return tuple(sentence for sentence in sentences if sentence)


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


def use_sentence(best: LoaderConfig, rate: Interval | None, unit: str = "samples/s") -> str:
    return f"Use {best}: {rate_words(rate, unit)}."


def undecided_sentence(why: str | None) -> str:
    return f"{UNDECIDED}: {why}. Until then this is the safest guess."


def reused_sentence(reused: Reused, partner: LoaderConfig | None, unit: str, why_long: str = "") -> str:
    """That an earlier result is used, and what its check saw."""
    paired = "" if reused.speedup is None else f", {reused.speedup:.2f}x as fast as {partner}"
    return (
        f"Reused: tuned at {reused.tuned_at} in {reused.seconds:.0f} s, and checked now in "
        f"{counted(reused.rounds, 'paired round')}: {reused.samples_per_s:,.0f} {unit}{paired}"
        f"{'; ' if why_long else ''}{why_long}."
    )


def failure_kinds(trials: Sequence[Trial]) -> list[str]:
    """What went wrong, each kind once."""
    return sorted({f"{trial.failure.kind}: {trial.failure.message}" for trial in trials if trial.failure is not None})


def failed_trials(trials: Sequence[Trial]) -> list[str]:
    """A sentence for each kind of failure, with the message of the first."""
    by_kind: dict[str, list[str]] = {}
    for trial in trials:
        if trial.failure is not None:
            by_kind.setdefault(trial.failure.kind, []).append(trial.failure.message)
    return [f"{counted(len(said), 'trial')} failed ({kind}): {said[0]}" for kind, said in sorted(by_kind.items())]


def slow_batches(first_fetch_s: float) -> str:
    """What must be said of rates where a batch takes seconds."""
    return (
        f"a batch takes about {first_fetch_s:.0f} s to fetch in one process, so there was no time for paired "
        "rounds (a larger budget has some)"
    )
