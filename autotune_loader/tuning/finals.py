"""The paired rounds of a tuning run: who enters them, and one round after the other until the race has enough.

    two sides     A B   B A   A B ...        each is as often first
    more          C A B   A B C ...          in random order

`paired` is the one loop: the final rounds of `tune()`, the check of an earlier result and `compare()` are three calls of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from autotune_loader.decision.acquisition import shortlist
from autotune_loader.decision.evidence import Ask, Evidence, EvidenceSource, Kind
from autotune_loader.decision.race import LEAST_OF_WINNER, Race, RaceRules
from autotune_loader.decision.selection import cost
from autotune_loader.decision.variants import faster_variants
from autotune_loader.tuning.state import SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement

FINALS_PATIENCE_S = 7.0
"""Open questions are worth this many seconds of rounds, and some more where these do not agree with the choice."""
CEILINGS = 3
"""So often the step alone is timed between the rounds: once after each of the first."""
MOST_OVERRUN_S = 2.0
"""A first round that would overrun the budget by more than this is not begun."""
ROUNDS_OF_AN_EPOCH = (1, 2)
"""Workers that fetch a short epoch in this many rounds are raced: they are done early, and leave the cores to the step."""
_Side = TypeVar("_Side", bound=Hashable)
_Outcome = TypeVar("_Outcome")


def run_finals(
    state: SearchState,
    seconds_left: Callable[[], float],
    on_round: Callable[[int, dict[LoaderConfig, float], float], None],
    seed: int = 0,
) -> None:
    """Rounds between the shortlist and the baseline, where anything can race.

    The state is told their outcome, also that of the rounds before Ctrl-C; whether whole epochs are run; and the ceilings
    between the rounds. Its beliefs learn from them.
    """
    source, beliefs = state.source, state.beliefs
    candidates = _candidates(state, seconds_left())
    if not candidates:
        return
    rules = RaceRules(
        tolerance=state.run.tolerance,
        cost=lambda config: cost(config, beliefs.space),
        patience_s=FINALS_PATIENCE_S,
        noise_sd=source.noise_sd(state.kind),
        ceiling=lambda config: rate.value if (rate := state.ceiling_of(config)) is not None else None,
    )
    # What is believed is believed of steady rates; also few rounds of epochs choose better without it.
    believe = (lambda: None) if state.whole_epochs else beliefs.posterior
    entrants = [source.as_trained(each) for each in candidates]
    race = Race(entrants, state.baseline, rules, believe, baseline_runs=beliefs.feasible(state.baseline) is None)

    def learn(gathered: Sequence[Evidence]) -> None:
        _learn(state, race, gathered, seconds_left())

    try:
        run_rounds(race, source, state.kind, seconds_left=seconds_left, seed=seed, learn=learn, on_round=on_round)
    finally:
        state.finals = race.outcome()


def _candidates(state: SearchState, seconds_left: float) -> list[LoaderConfig]:
    """Who races, as time allows: best guess first."""
    source, beliefs, whole, tolerance = state.source, state.beliefs, state.whole_epochs, state.run.tolerance
    known = beliefs.over_epochs(source.as_trained) if whole else beliefs.posterior()
    if known is None:
        return []
    rule, space = beliefs.plain_rule(), beliefs.space
    chosen = faster_variants(state.trials, space, tolerance) + shortlist(known, space, tolerance)
    chosen += [rule] if rule is not None else []
    # One that hangs in a round takes the time of many rounds.
    chosen = [config for config in chosen if not beliefs.is_unproven(config)]
    if whole and chosen:
        # Of these the search's bursts, which know steady rates alone, tell least; and no belief decides between them.
        chosen[1:1] = _fetched_in_few_rounds(chosen[0], source.context.epoch_batches or 1, space.max_workers)

    def round_s() -> float:
        return source.round_s([*chosen, state.baseline], state.kind)

    least_rounds = LEAST_OF_WINNER if whole else 1
    while len(chosen) > 1 and least_rounds * round_s() > seconds_left:
        chosen.pop()
    return chosen if round_s() - seconds_left <= MOST_OVERRUN_S else []


def _learn(state: SearchState, race: Race, gathered: Sequence[Evidence], seconds_left: float) -> None:
    """What a round adds to the beliefs, and who else becomes a candidate by it."""
    beliefs = state.beliefs
    for evidence in gathered:
        beliefs.log.add(evidence)
    incumbent = race.incumbent() if state.run.workload.has_step and seconds_left > 0 else None
    if incumbent is not None:
        _time_step_alone(state, incumbent)
    beliefs.log.leave_out(race.disturbed())
    known = None if state.whole_epochs else beliefs.posterior()
    if known is not None and race.is_admitting():
        # As the one that cannot be told from it, if that races already.
        racing = {each.key(): each for each in reversed(race.configs)}
        nominated = shortlist(known, beliefs.space, state.run.tolerance)
        proven = [each for each in nominated if not beliefs.is_unproven(each)]
        race.admit([racing.get(each.key()) or state.source.as_trained(each) for each in proven])


def _time_step_alone(state: SearchState, incumbent: LoaderConfig) -> None:
    """The step alone once more, under the load that the rounds run under."""
    size = incumbent.batch_size
    beside = state.ceilings_beside.setdefault(size, [])
    if len(beside) < CEILINGS:
        measured = state.source.step_ceiling(size)
        beside += [measured] if isinstance(measured, Measurement) else []


def run_rounds(
    race: Race,
    source: EvidenceSource,
    kind: Kind = "steady",
    *,
    seconds_left: Callable[[], float],
    seed: int = 0,
    learn: Callable[[Sequence[Evidence]], None] = lambda gathered: None,
    on_round: Callable[[int, dict[LoaderConfig, float], float], None] = lambda number, rates, seconds_left: None,
) -> None:
    """Run rounds until the race is decided, or another one is not worth its time.

    `learn` is told the evidence of each round, which the race has recorded; `on_round` its number from 1, its rates, and the
    seconds left.
    """

    def sides(_number: int) -> Sequence[LoaderConfig]:
        return race.next_round(seconds_left())

    def observe(config: LoaderConfig, number: int) -> Evidence:
        return source.gather(config, Ask(phase="compare", kind=kind, group=number))

    for gathered, seconds in paired(sides, observe, seed=seed, clock=lambda: -seconds_left()):
        done = race.record([(config, each.outcome) for config, each in gathered], seconds)
        learn([each for _, each in gathered])
        on_round(len(race.rounds), dict(done.rates), seconds_left())


def paired(
    sides: Callable[[int], Sequence[_Side]],
    observe: Callable[[_Side, int], _Outcome],
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[list[tuple[_Side, _Outcome]], float]]:
    """Round after round, everybody once a round, so that whatever slows a round cancels in its ratios.

    Args:
        sides: who takes part in the round of this number, from 0; nobody ends the loop.
        observe: observes one side in one round, over the samples that belong to the number of the round.
        seed: of the order.
        clock: seconds.

    Yields:
        What was observed in a round, in the order of observation, and the seconds that it took.
    """
    number, order = 0, random.Random(seed)
    while entrants := list(sides(number)):
        begun = clock()
        if len(entrants) > 2:
            order.shuffle(entrants)
        elif number % 2:
            entrants.reverse()
        yield [(side, observe(side, number)) for side in entrants], clock() - begun
        number += 1


def _fetched_in_few_rounds(config: LoaderConfig, epoch_batches: int, max_workers: int) -> list[LoaderConfig]:
    """As many workers as fetch an epoch in one round, and in two, where these are more; the step has its own threads again."""
    more = [math.ceil(epoch_batches / rounds) for rounds in ROUNDS_OF_AN_EPOCH]
    return [
        replace(config, num_workers=workers, consumer_threads=None)
        for workers in more
        if 0 < config.num_workers < workers <= max_workers
    ]
