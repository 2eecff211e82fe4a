"""Paired rounds between the few sides that are left: who runs next, whether it is decided, who is chosen.

Everybody runs once, in random order. Then those run who still tell something: the one that would be chosen now, the rival of
which another pair adds most to the probability that the choice loses no more than the tolerance, and the baseline until it is
clearly slower in two rounds. Whoever is shown to be slower than the chosen one by more than the tolerance sits out. Rounds
end, two at the least, when that probability is 0.95, when the choice is as fast as the step alone, or when no pair adds a
point to it for each of its seconds: a point at all while the baseline may be as fast.

The bursts of the search chose the sides, so no rate that is reported comes from them: the best of many noisy bursts looks
better than it is. For the choice itself a belief counts as one more witness, where there is one: few rounds cannot tell 3 %
apart, the twin often can. Nothing here runs anything or knows a clock: the caller runs the rounds and records them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any

import numpy as np

from autotune_loader.search.belief import UNKNOWN_SD, Belief, choose, equally_fast
from autotune_loader.search.draws import Draws, Observed, draw
from autotune_loader.values import Effects, Failure, Interval, Measurement, Round, log_ratios

CERTAIN = 0.95
"""A choice that loses no more than the tolerance with this probability needs no further rounds."""
WORTH = 0.01
"""Another pair must add this much to that probability for each of its seconds; at all where the baseline may be as fast."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 40
"""One burst gives no interval; and a comparison ends."""
ADMITTING_ROUNDS = 2
"""New sides may join after the first rounds, so that each runs in more than one."""
CLEARLY = 2.0
"""The baseline sits out once it is slower by more than so many times the tolerance."""
NEAR_CEILING, ABOVE_CEILING = 0.95, 1.08
"""As fast as the step alone, within noise: a loader has nothing left to gain. Beyond the second the ceiling is none."""
MAX_FAILURES = 2
"""A side that failed this often is out ..."""
OUT_AT_ONCE = ("deadline",)
"""... and at once by these: it would hang again."""


class RoundsEnd(Enum):
    """Why there is no further round."""

    SAFE = "safe"  # the choice is within the tolerance, almost certainly
    CEILING = "ceiling"  # as fast as the step alone
    NOT_WORTH_IT = "not_worth_it"  # no pair adds a point
    NO_TIME = "no_time"
    ALL_FAILED = "all_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsOutcome:
    """The rounds and what they say."""

    rounds: tuple[Round, ...]
    winner: Any
    rate: Interval
    """Rate of the winner, from these rounds alone."""
    speedup: Interval | None
    """Winner over baseline; None when no round measured both."""
    as_fast: tuple[Any, ...]
    """Who counts as equally fast as the winner, by the rule that chose it; none of them is cheaper."""
    at_ceiling: bool
    """Whether it is as fast as the step alone in two rounds or more: no loader can be faster."""


class Rounds:
    """The state of paired rounds between some sides and a baseline.

    Args:
        sides: what may win, best guess first: configurations, or any names.
        baseline: what the winner is compared with; it may win too.
        tolerance: relative difference that counts as equally fast.
        cost: what a side costs, compared as tuples are.
        believe: what is known of everything, these rounds included, where sides are configurations; None, and the rounds alone
            decide.
        ceiling: samples/s of the step alone; None where that is unknown.
    """

    def __init__(
        self,
        sides: Sequence[Any],
        baseline: Any,
        *,
        tolerance: float = 0.02,
        cost: Callable[[Any], tuple[float, ...]] = lambda side: (),
        believe: Callable[[], Belief | None] = lambda: None,
        ceiling: float | None = None,
    ) -> None:
        self.sides, self.baseline, self.tolerance = list(dict.fromkeys([*sides, baseline])), baseline, tolerance
        self.rounds: list[Round] = []
        self.ended: RoundsEnd | None = None
        self._cost, self._believe, self._ceiling = cost, believe, ceiling
        self._succeeded, self._failed = Counter[Any](), Counter[Any]()
        self._spent_s, self._ran = 0.0, 0

    @property
    def number(self) -> int:
        """Rounds that were recorded."""
        return len(self.rounds)

    def record(self, outcomes: Sequence[tuple[Any, Measurement | Failure]], seconds: float) -> Round:
        """One round, in the order in which it was run, and the seconds that it took."""
        measured = {side: outcome for side, outcome in outcomes if isinstance(outcome, Measurement)}
        for side, outcome in outcomes:
            if isinstance(outcome, Failure):
                self._failed[side] += MAX_FAILURES if outcome.kind in OUT_AT_ONCE else 1
        self._succeeded.update(list(measured))
        foreign = [m.foreign_cpu_share for m in measured.values() if m.foreign_cpu_share is not None]
        rates = {side: m.samples_per_s.value for side, m in measured.items()}
        self.rounds.append(Round(rates=rates, foreign_cpu_share=max(foreign, default=None)))
        self._spent_s, self._ran = self._spent_s + seconds, self._ran + len(outcomes)
        return self.rounds[-1]

    def admit(self, suggested: Callable[[], Sequence[Any]]) -> None:
        """Add the first of the sides that the first rounds suggest, if it does not run yet; later ones are not asked for."""
        if self.number <= ADMITTING_ROUNDS:
            self.sides += [side for side in suggested()[:1] if side not in self.sides]

    def active(self) -> list[Any]:
        """Who has not failed too often."""
        return [side for side in self.sides if self._failed[side] < MAX_FAILURES]

    def incumbent(self, least_rounds: int = 1) -> Any | None:
        """Who would be chosen now, of those that ran so often, if any did; None where nobody ran."""
        active = self.active()
        most = max((self._succeeded[side] for side in active), default=0)
        ran = [side for side in active if self._succeeded[side] >= min(least_rounds, most)]
        if not most:
            return None
        chosen = ran[choose(self._draws(ran), [self._cost(side) for side in ran], self.tolerance)]
        cheaper = [side for side in ran if self._cost(side) < self._cost(chosen) and self._beats(side, chosen)]
        return min(cheaper, key=self._cost, default=chosen)

    def _beats(self, side: Any, other: Any) -> bool:
        """Whether its rounds say so: a choice that the table of rounds contradicts would be believed by nobody."""
        logs = log_ratios(self.rounds, side, other)
        return len(logs) >= LEAST_ROUNDS and fmean(logs) > math.log1p(self.tolerance)

    def entrants(self, seconds_left: float = math.inf) -> list[Any]:
        """Who runs in the next round; nobody, and `ended` says why, where it does not fit or would not be worth its time."""
        entrants, end = self._next()
        round_s = len(entrants) * self._spent_s / max(self._ran, 1)
        if end is None and seconds_left < round_s:
            end = RoundsEnd.NO_TIME
        self.ended = end
        return [] if end is not None else _in_turns(entrants, self.number)

    def outcome(self) -> RoundsOutcome | None:
        """What the rounds say; None where none could be completed."""
        winner = self.incumbent(LEAST_ROUNDS)
        if winner is None:
            return None
        ran, effects = [side for side in self.sides if self._succeeded[side]], self._effects()
        equal = [ran[index] for index in equally_fast(self._draws(ran), self.tolerance)]
        speedup: Interval | None = Interval(value=1.0, low=1.0, high=1.0, count=self.number)
        if winner != self.baseline:
            speedup = effects.ratio(winner, self.baseline) if self.baseline in ran else None
        return RoundsOutcome(
            rounds=tuple(self.rounds),
            winner=winner,
            rate=effects.rate(winner, chosen_of=len(self._contenders(effects, winner)) + 1),
            speedup=speedup,
            as_fast=tuple(side for side in equal if side != winner and self._cost(side) >= self._cost(winner)),
            at_ceiling=self._is_at_ceiling(winner),
        )

    def _next(self) -> tuple[list[Any], RoundsEnd | None]:
        active, incumbent = self.active(), self.incumbent()
        if not active:
            return [], RoundsEnd.ALL_FAILED
        if incumbent is None:
            return active, RoundsEnd.ALL_FAILED if self.number >= LEAST_ROUNDS else None
        new = [side for side in active if not self._succeeded[side]]
        ran = [side for side in active if side not in new]
        draws, effects = self._draws(ran), self._effects()
        inside = draws.within(self.tolerance)
        rivals = [s for s in self._contenders(effects, incumbent) if s in ran]
        here = ran.index(incumbent)
        worth = {side: draws.worth_of_pair(here, ran.index(side), self.tolerance) for side in rivals}
        best = max(worth, key=lambda side: worth[side], default=incumbent)
        wanted, pair_s = {incumbent, best, *new}, 2 * self._spent_s / max(self._ran, 1)
        if self.baseline in ran and self.baseline != incumbent:
            slower = effects.ratio(self.baseline, incumbent).high
            is_clearly_slower = slower < 1 - CLEARLY * self.tolerance and self.number >= LEAST_ROUNDS
            wanted |= set() if is_clearly_slower else {self.baseline}
            pair_s = pair_s if slower < 1 else 1.0
        end = None if new else self._end(incumbent, float(inside[here]), worth.get(best, 0.0) / pair_s)
        return [side for side in self.sides if side in wanted], end

    def _end(self, incumbent: Any, probability: float, worth: float) -> RoundsEnd | None:
        if self.number >= MOST_ROUNDS:
            return RoundsEnd.NOT_WORTH_IT
        if self.number < LEAST_ROUNDS or self._succeeded[incumbent] < LEAST_ROUNDS:
            return None
        if self._is_at_ceiling(incumbent):
            return RoundsEnd.CEILING
        if probability >= CERTAIN:
            return RoundsEnd.SAFE
        return RoundsEnd.NOT_WORTH_IT if worth < WORTH else None

    def _contenders(self, effects: Effects, incumbent: Any) -> list[Any]:
        """Who is not shown to be slower than this one by more than the tolerance."""
        others = [side for side in effects.keys if side != incumbent]
        return [side for side in others if effects.ratio(side, incumbent).high >= 1 - self.tolerance]

    def _is_at_ceiling(self, side: Any) -> bool:
        """Whether it is as fast as the step alone, in the mean of two rounds or more; a faster one denies that ceiling."""
        ceiling, often = self._ceiling, [each for each in self.active() if self._succeeded[each] >= LEAST_ROUNDS]
        means = {each: fmean(r.rates[each] for r in self.rounds if each in r.rates) for each in often}
        if ceiling is None or side not in means or max(means.values()) > ABOVE_CEILING * ceiling:
            return False
        return means[side] >= NEAR_CEILING * ceiling

    def _effects(self) -> Effects:
        return Effects([each for each in self.rounds if each.rates])

    def _draws(self, sides: Sequence[Any]) -> Draws:
        """What is believed of some sides that ran: by all that is known, or by the rounds alone."""
        belief = self._believe()
        if belief is not None:
            return belief.draws.of([side.key() for side in sides])
        cells = [
            (sides.index(side), number, math.log(rate))
            for number, each in enumerate(self.rounds)
            for side, rate in each.rates.items()
            if side in sides
        ]
        where, numbers, logs = (np.array(each) for each in zip(*cells, strict=True))
        observed = Observed(where=where, logs=logs, variances=np.zeros(len(logs)), rounds=numbers)
        return draw(sides, np.full(len(sides), logs.mean()), UNKNOWN_SD**2 * np.eye(len(sides)), observed)


def _in_turns(sides: Sequence[Any], number: int) -> list[Any]:
    """The order of a round: of two sides each is first as often, more are shuffled."""
    order = list(sides)
    if len(order) > 2:
        random.Random(number).shuffle(order)
    elif number % 2:
        order.reverse()
    return order


def run_rounds(
    rounds: Rounds,
    burst: Callable[[Any, int], Trial],
    budget: Budget,
    on_round: Callable[[dict[Any, float]], None],
) -> None:
    """Run rounds until they decide, or another one is not worth its time.

    Args:
        rounds: who takes part, and what was seen.
        burst: one burst of a side in the round of this number, from 0; what it saw is remembered by the caller.
        budget: a round that does not fit into it is not begun.
        on_round: told the rates of each round.
    """
    while sides := rounds.entrants(budget.left()):
        begun, number = budget.clock(), rounds.number
        outcomes = [(side, burst(side, number).outcome) for side in sides]
        done = rounds.record(outcomes, budget.clock() - begun)
        on_round(dict(done.rates))
