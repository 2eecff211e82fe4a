"""What runs next, and when to stop: one rule, for single bursts and for paired rounds.

    one burst    of what would be chosen, or of its rival, where it never ran
    a round      the choice and its rival in turns, and the caller's own while it may be nearly as fast
    the end      the choice is as fast as the ceiling; or it loses no more than the tolerance, almost certainly or as can be
                 expected, the rounds say nothing else, and the caller's own is not in doubt; or the budget has no room for more

The bursts that led to a choice make it look better than it is: it runs in two rounds at least, and rates are reported of rounds
alone. Nothing here runs anything or knows a clock.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeVar

from autotune_loader.search.belief import CERTAIN, Belief
from autotune_loader.values import BURSTS_DIFFER, LoaderConfig

LEAST_ROUNDS = 2  # one burst gives no interval
MOST_ROUNDS = 40  # of one run: what the arithmetic takes grows with them
CLEARLY = 2.0  # the caller's own sits out once it is slower by more than so many times the tolerance, almost certainly
MOST_OVERRUN_S = 2.0  # by which a first round may overrun the budget
START_S, FEWEST_BATCHES = 0.5, 3  # of a burst that never ran, where its batches are slow
MOST_FAILED = 8  # bursts in a row that fail before a search ends

Side = TypeVar("Side")
StopReason = Literal["SAFE", "CEILING", "EXPECTED", "ROUNDS", "BUDGET", "FAILING"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What to measure, in this order; nothing, and why, where the search ends."""

    configs: tuple[LoaderConfig, ...] = ()
    is_round: bool = False
    stop: StopReason | None = None


def what_next(
    belief: Belief,
    *,
    baseline: LoaderConfig | None = None,
    ceiling: float | None = None,
    seconds_left: float = math.inf,
    elsewhere: Collection[LoaderConfig] = (),
    least_rounds: int = LEAST_ROUNDS,
    rounds_before: int = 0,
) -> Next:
    """The next burst, or the next round, of a search in which something has succeeded.

    Args:
        belief: what is known.
        baseline: the caller's own configuration; None where it has none, or has failed.
        ceiling: samples/s that no configuration can exceed; None where that is unknown.
        seconds_left: of the budget.
        elsewhere: what others measure at this moment, as keys.
        least_rounds: in which the choice has to run.
        rounds_before: of earlier runs with the same study.
    """
    choice, tried = belief.choice, {trial.config.key() for trial in belief.trials}
    assert choice is not None
    if all(trial.failure for trial in belief.trials[-MOST_FAILED:]):
        return Next(stop="FAILING")
    if len(belief.rounds) - rounds_before >= MOST_ROUNDS:
        return Next(stop="ROUNDS")
    own = baseline if baseline is not None and baseline.key() in belief.configs else choice
    contradiction = belief.contradiction(choice)
    rival = contradiction or belief.rival(choice) or choice
    stop: StopReason | None = None
    if is_at_ceiling(belief, choice, ceiling):
        stop = "CEILING"
    elif belief.probability(choice) >= CERTAIN:
        stop = "SAFE"
    elif not _may_lose_much(belief, choice, own):
        stop = "EXPECTED"
    # Once workers have failed, more of them than have succeeded are tried before they are chosen.
    bold = belief.choice_of(belief.configs)
    alone = [*([] if bold.key() in belief.proven else [bold]), *([] if stop else [rival])]
    untried = [each for each in alone if each.key() not in tried and each.key() not in elsewhere]
    if untried:
        needs_s = bursts_s(belief, [untried[0]]) + bursts_s(belief, [choice, own])
        if len(tried) < 2 or needs_s <= seconds_left:
            return Next(configs=(untried[0],))
    ran, beside = [sum(each in r.rates for r in belief.rounds) for each in (choice, own)]
    if stop and ran >= least_rounds and contradiction is None:
        return Next(stop=stop)
    is_slower = belief.is_faster(choice, own, 1 + CLEARLY * belief.tolerance) >= CERTAIN
    is_out = is_slower and min(ran, beside) >= LEAST_ROUNDS
    room_s = seconds_left + (0.0 if belief.rounds else MOST_OVERRUN_S)
    for entrants in ([choice, rival, *([] if is_out else [own])], [choice, rival], [choice, own]):
        sides = list(dict.fromkeys(entrants))
        if bursts_s(belief, sides) <= room_s:
            return Next(configs=tuple(in_turns(sides, len(belief.rounds))), is_round=True)
    if own.key() not in tried and bursts_s(belief, [own]) <= room_s:
        return Next(configs=(own,))
    return Next(stop="BUDGET")


def _may_lose_much(belief: Belief, choice: LoaderConfig, own: LoaderConfig) -> bool:
    """Whether the choice is expected to lose more than the tolerance; or the caller's own, and it is not known to be slower.

    What is undecided leaves the caller its own: while that may lose much, it matters which of the two is faster.
    """
    if belief.loss(choice) > belief.tolerance:
        return True
    return belief.loss(own) > belief.tolerance and belief.is_faster(choice, own) < CERTAIN


def is_at_ceiling(belief: Belief, config: LoaderConfig, ceiling: float | None) -> bool:
    """Whether it is as fast as that, in the mean of two bursts or more; a much faster one denies that ceiling."""
    rates = defaultdict[LoaderConfig, list[float]](list)
    for trial in belief.trials:
        if trial.samples_per_s is not None:
            rates[trial.config.key()].append(trial.samples_per_s)
    means = {key: fmean(each) for key, each in rates.items() if len(each) > 1}
    if ceiling is None or config.key() not in means or max(means.values()) > (1 + BURSTS_DIFFER) * ceiling:
        return False
    return means[config.key()] >= (1 - belief.tolerance) * ceiling


def bursts_s(belief: Belief, configs: Sequence[LoaderConfig]) -> float:
    """Seconds that a burst of each takes, by what earlier ones took; of slow batches without workers, by their rate."""
    measured = {each.config.key(): each for each in belief.trials if each.measurement is not None}
    longest_s = max((each.seconds for each in measured.values()), default=0.0)
    size = max((each.measurement.batch_size for each in measured.values() if each.measurement), default=0.0)

    def burst_s(config: LoaderConfig) -> float:
        if config in measured:
            return measured[config].seconds
        rate = None if config.num_workers else belief.predicted(config)
        return longest_s if rate is None else START_S + FEWEST_BATCHES * size / rate

    return sum(burst_s(config) for config in dict.fromkeys(each.key() for each in configs))


def in_turns(sides: Sequence[Side], number: int) -> list[Side]:
    """The sides of a round in order: of two each is first as often, more are shuffled."""
    order = list(sides)
    if len(order) > 2:
        random.Random(number).shuffle(order)
    return order[::-1] if number % 2 else order
