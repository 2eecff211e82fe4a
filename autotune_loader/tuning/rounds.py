"""The rounds: sides run in turns, each once a round, so that whatever slows a round cancels in its ratios.

Who runs next, and when there is nothing more to be learnt, is decided by `search.rounds.Rounds`; here it is done, within the
budget. `tune()` runs the best few and what the user has now; `compare()` runs its sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune_loader.search.rounds import Rounds
from autotune_loader.tuning.bursting import Budget
from autotune_loader.values.trial import Trial


def run_rounds(
    rounds: Rounds,
    burst: Callable[[Any, int], Trial],
    budget: Budget,
    on_round: Callable[[dict[Any, float]], None] = lambda rates: None,
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
