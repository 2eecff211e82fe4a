"""The one loop of paired rounds: everybody once a round, so that whatever slows a round cancels in its ratios.

    two sides     A B   B A   A B ...        each is as often first
    more          C A B   A B C ...          in random order

The final rounds of `tune()`, the check of an earlier result and `compare()` are three calls of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

_Side = TypeVar("_Side", bound=Hashable)
_Outcome = TypeVar("_Outcome")


def paired(
    sides: Callable[[int], Sequence[_Side]],
    observe: Callable[[_Side, int], _Outcome],
    record: Callable[[Sequence[tuple[_Side, _Outcome]], float], object],
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run round after round until nobody takes part in the next one.

    Args:
        sides: who takes part in the round of this number, from 0; nobody ends the loop.
        observe: observes one side in one round, over the samples that belong to the number of the round.
        record: receives what was observed, in the order of observation, and the seconds that the round took.
        seed: of the order.
        clock: seconds.
    """
    number, order = 0, random.Random(seed)
    while entrants := sides(number):
        begun = clock()
        turns = _turns(list(entrants), number, order)
        record([(side, observe(side, number)) for side in turns], clock() - begun)
        number += 1


def _turns(entrants: list[_Side], number: int, order: random.Random) -> list[_Side]:
    if len(entrants) > 2:
        return order.sample(entrants, len(entrants))
    return entrants if number % 2 == 0 else entrants[::-1]
