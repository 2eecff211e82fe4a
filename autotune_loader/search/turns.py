"""What runs next, and when to stop: one rule, for single bursts and for paired rounds.

    one burst    of what would be chosen, or of its rival, where it never ran
    a round      the choice and its rival in turns, and the caller's own while it may be nearly as fast
    the end      the choice loses no more than the tolerance, almost certainly; or it is as fast as the step alone; or another
                 pair is not worth its seconds, and the caller's own is not in doubt; or the budget has no room for it

The bursts that led to a choice make it look better than it is: it runs in two rounds at least, and rates are reported of rounds
alone. Nothing here runs anything or knows a clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeVar

from autotune_loader.search.belief import CERTAIN, Belief
from autotune_loader.values import LoaderConfig

WORTH = 0.01
"""A pair must add this much to the probability of a good choice for each of its seconds."""
LEAST_ROUNDS, MOST_ROUNDS, MOST_ALONE = 2, 40, 16
"""One burst gives no interval; and a search ends, also one of so many configurations that ran by themselves."""
CLEARLY = 2.0
"""The caller's own sits out once it is slower by more than so many times the tolerance, almost certainly."""
CEILING_PASSED = 0.15
"""A ceiling is none where something is faster by more than this."""
MOST_OVERRUN_S = 2.0
"""A first round may overrun the budget by so much."""
START_S, FEWEST_BATCHES = 0.5, 3
"""What a burst takes that never ran, where its batches are slow: so many of them, and its start."""

MOST_FAILED = 8
"""A search ends when so many bursts in a row have failed."""

Side = TypeVar("Side")
StopReason = Literal["SAFE", "CEILING", "NOT_WORTH_IT", "BUDGET", "FAILING"]


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
) -> Next:
    """The next burst, or the next round, of a search in which something has succeeded.

    Args:
        belief: what is known.
        baseline: the caller's own configuration; None where it has none, or has failed.
        ceiling: samples/s of the step alone; None where that is unknown.
        seconds_left: of the budget.
        elsewhere: what others measure at this moment, without what a burst cannot see.
        least_rounds: in which the choice has to run.
    """
    choice, tried = belief.choice, {trial.config.key() for trial in belief.trials}
    assert choice is not None
    if len(belief.trials) > MOST_FAILED and all(trial.failure for trial in belief.trials[-MOST_FAILED:]):
        return Next(stop="FAILING")
    own = baseline if baseline is not None and baseline.key() in belief.configs else choice
    rival, worth = belief.rival(choice) or (choice, 0.0)
    pair_s = max(sum(burst_s(belief, each) for each in (choice, rival)), 1.0)
    stop: StopReason | None = None
    if is_at_ceiling(belief, choice, ceiling):
        stop = "CEILING"
    elif belief.probability(choice) >= CERTAIN:
        stop = "SAFE"
    elif worth < WORTH * pair_s or len(belief.rounds) >= MOST_ROUNDS or len(tried) >= MOST_ALONE:
        stop = "NOT_WORTH_IT"
    # Once workers have failed, more of them than have succeeded are tried before they are chosen.
    bold = belief.choice_of(belief.configs)
    alone = [*([] if bold.key() in belief.proven else [bold]), *([] if stop else [rival])]
    untried = [each for each in alone if each.key() not in tried and each.key() not in elsewhere]
    least_s = round_s(belief, [choice, own])
    if untried and (len(tried) < 2 or burst_s(belief, untried[0]) + least_s <= seconds_left):
        return Next(configs=(untried[0],))
    ran, beside = [sum(each in r.rates for r in belief.rounds) for each in (choice, own)]
    # What is undecided leaves the caller its own: while that may lose much, it matters which of the two is faster.
    is_dear = own.key() != choice.key() and belief.loss(own) > belief.tolerance
    is_in_doubt = is_dear and belief.is_faster(choice, own) < CERTAIN and len(belief.rounds) < MOST_ROUNDS
    if stop and ran >= least_rounds and not (stop == "NOT_WORTH_IT" and is_in_doubt):
        return Next(stop=stop)
    is_out = (
        min(ran, beside) >= LEAST_ROUNDS and belief.is_faster(choice, own, 1 + CLEARLY * belief.tolerance) >= CERTAIN
    )
    sides = dict.fromkeys([choice, *([] if is_out else [own]), *([] if stop else [rival])])
    room_s = seconds_left + (0.0 if belief.rounds else MOST_OVERRUN_S)
    for entrants in ([*sides], [each for each in sides if each != rival or each == own]):
        if round_s(belief, entrants) <= room_s:
            return Next(configs=tuple(in_turns(entrants, len(belief.rounds))), is_round=True)
    if own.key() not in tried and burst_s(belief, own) <= room_s:
        return Next(configs=(own,))
    return Next(stop="BUDGET")


def is_at_ceiling(belief: Belief, config: LoaderConfig, ceiling: float | None) -> bool:
    """Whether it is as fast as the step alone, in the mean of two bursts or more; a much faster one denies that ceiling."""
    rates: dict[LoaderConfig, list[float]] = {}
    for trial in belief.trials:
        if trial.samples_per_s is not None:
            rates.setdefault(trial.config.key(), []).append(trial.samples_per_s)
    means = {key: fmean(each) for key, each in rates.items() if len(each) > 1}
    if ceiling is None or config.key() not in means or max(means.values()) > (1 + CEILING_PASSED) * ceiling:
        return False
    return means[config.key()] >= (1 - belief.tolerance) * ceiling


def burst_s(belief: Belief, config: LoaderConfig) -> float:
    """Seconds that a burst takes, by what earlier ones took; of slow batches without workers, by their rate."""
    took = {each.config.key(): each.seconds for each in belief.trials if each.measurement is not None}
    if config.key() in took:
        return took[config.key()]
    longest_s, rate = max(took.values(), default=0.0), belief.predicted(config)
    if config.num_workers or rate is None:
        return longest_s
    size = max(each.measurement.batch_size for each in belief.trials if each.measurement is not None)
    return START_S + FEWEST_BATCHES * size / rate


def round_s(belief: Belief, configs: Sequence[LoaderConfig]) -> float:
    """Seconds that a round of these takes."""
    return sum(burst_s(belief, each) for each in {each.key(): each for each in configs}.values())


def in_turns(sides: Sequence[Side], number: int) -> list[Side]:
    """The sides of a round in order: of two each is first as often, more are shuffled."""
    order = list(sides)
    if len(order) > 2:
        random.Random(number).shuffle(order)
    return order[::-1] if number % 2 else order
