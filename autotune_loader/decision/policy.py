"""What to observe next, given what is believed.

    the configurations to begin with ─► what the plain rule makes of them ─► the one of which an observation teaches most, again
    and again; never far beyond the workers that succeeded, once more have failed

Pure: the caller observes, records and asks again. Who runs in the paired rounds is decided in `race`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autotune_loader.decision.acquisition import suggest
from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.stopping import StopReason
from autotune_loader.values.config import LoaderConfig

CEILING_SHARE, CEILING_TRIALS = 0.98, 2
"""The ceiling is reached when the rates of so many trials come this close to it; one alone may have been lucky."""
MOST_REPEATS = 20
"""A sampler that repeats itself so often in a row has nothing new to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explore:
    """Observe this configuration; None lets a sampler propose one."""

    config: LoaderConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Nothing more is worth its time."""

    reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is wanted, and what may still be spent on it."""

    tolerance: float
    """Relative difference that counts as equally fast."""
    explore_s: float = float("inf")
    """Seconds left for exploring; 0 or less ends it."""
    next_s: float = 0.0
    """Seconds that one more observation will take."""
    has_trials_left: bool = True
    begin_with: Sequence[LoaderConfig] = ()
    """What to observe first, in this order."""
    queue: Sequence[LoaderConfig] | None = None
    """All that is to be observed, for a search that walks a grid; None lets beliefs or the sampler propose."""
    elsewhere: Collection[LoaderConfig] = ()
    """What other hosts observe at this moment: passed over."""
    by_belief: bool = True
    """Whether beliefs propose; otherwise the sampler does."""
    repeats: int = 0
    """How often in a row the sampler has proposed what was observed before."""
    ceiling: float | None = None
    """Samples/s of the step alone, where that is known."""


def explore(beliefs: Beliefs, goal: Goal) -> Explore | Stop:
    """The next configuration to observe: what is to be observed first, then whatever teaches most."""
    reason = _reason_to_stop(beliefs, goal) if len(beliefs.log) else None
    if reason is not None:
        return Stop(reason=reason)
    tried = {each.config for each in beliefs.log} | set(goal.elsewhere)
    planned = goal.begin_with if goal.queue is None else [*goal.begin_with, *goal.queue]
    untried = next((each for each in planned if each not in tried and not beliefs.is_beyond_failures(each)), None)
    if untried is not None:
        return Explore(config=untried)
    if goal.queue is not None:
        return Stop(reason=StopReason.CHOICE_SAFE)
    keys = {config.key() for config in tried}
    rule = beliefs.plain_rule() if goal.by_belief else None
    if rule is not None and beliefs.below_failures(rule) not in keys:
        return Explore(config=beliefs.below_failures(rule))
    if not goal.by_belief:
        return Explore(config=None)
    posterior = beliefs.posterior()
    config = None if posterior is None else suggest(posterior, beliefs.space, keys, goal.tolerance)
    if config is None:
        return Stop(reason=StopReason.CHOICE_SAFE)
    return Explore(config=beliefs.below_failures(config))


def _reason_to_stop(beliefs: Beliefs, goal: Goal) -> StopReason | None:
    if not goal.has_trials_left:
        return StopReason.OUT_OF_TRIALS
    if goal.explore_s - goal.next_s < 0:
        return StopReason.OUT_OF_BUDGET
    if goal.repeats >= MOST_REPEATS:
        return StopReason.SAMPLER_REPEATS
    rates = [each.measurement.samples_per_s.value for each in beliefs.log if each.measurement is not None]
    reaching = sum(rate >= CEILING_SHARE * (goal.ceiling or float("inf")) for rate in rates)
    return StopReason.CEILING if goal.by_belief and reaching >= CEILING_TRIALS else None
