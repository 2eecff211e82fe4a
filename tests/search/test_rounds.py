"""Paired rounds: no claim without difference, the cheapest of equals, an end by evidence, and failures survived."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune_loader.search.belief import Belief
from autotune_loader.search.draws import PATHS, Draws
from autotune_loader.search.rounds import MAX_FAILURES, MOST_ROUNDS, Rounds, RoundsEnd, RoundsOutcome
from autotune_loader.search.space import Context, Space
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BurstPlan, Failure, Measurement, Trial
from autotune_loader.values.statistics import Interval
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe

BASELINE = LoaderConfig()
FEW, SOME, MANY = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
BROKEN = Failure(kind="crashed", phase="batches", message="no")
BURST_S = 1.0
Rate = float | Failure | Callable[[], float | Failure]


def _shape() -> Measurement:
    burst = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(FEW, BurstPlan(max_s=0.3, min_s=0.1))
    assert isinstance(burst, Measurement)
    return replace(burst, traces=())


SHAPE = _shape()


def measured(rate: float) -> Measurement:
    return replace(SHAPE, samples_per_s=Interval(value=rate, low=rate * 0.98, high=rate * 1.02, count=20))


class Bench:
    """Runs rounds whose bursts have given rates, with noise; each takes a second."""

    def __init__(self, rates: Mapping[Any, Rate], *, noise: float = 0.0, seed: int = 0) -> None:
        self.rates, self.noise, self.rng = rates, noise, random.Random(seed)
        self.asked: list[Any] = []
        self.seconds = 0.0

    def burst(self, side: Any) -> Measurement | Failure:
        self.asked.append(side)
        self.seconds += BURST_S
        rate = self.rates[side]
        rate = rate() if callable(rate) else rate
        return rate if isinstance(rate, Failure) else measured(rate * (1 + self.rng.gauss(0, self.noise)))

    def run(
        self, rounds: Rounds, *, budget_s: float = math.inf, nominate: Callable[[], Sequence[Any]] = list
    ) -> Rounds:
        while sides := rounds.entrants(budget_s - self.seconds):
            rounds.record([(side, self.burst(side)) for side in sides], BURST_S * len(sides))
            rounds.admit(nominate)
        return rounds


def some_rounds(sides: Sequence[Any], **more: Any) -> Rounds:
    """Rounds of configurations beside the baseline."""
    return Rounds(sides, BASELINE, **{"cost": lambda config: (config.num_workers,), **more})


def outcome_of(rounds: Rounds) -> RoundsOutcome:
    found = rounds.outcome()
    assert found is not None
    return found


# Who wins


@pytest.mark.parametrize(
    ("rates", "winner"),
    [
        ({BASELINE: 50.0, FEW: 99.9, SOME: 100.0, MANY: 100.1}, FEW),
        ({BASELINE: 50.0, FEW: 95.0, SOME: 100.0, MANY: 99.0}, SOME),
        ({BASELINE: 100.0, FEW: 100.1, SOME: 100.0, MANY: 99.0}, BASELINE),
    ],
    ids=["of equals the cheapest", "not one that is slower than the tolerance", "the baseline itself"],
)
def test_the_cheapest_of_the_fastest_wins(rates: Mapping[LoaderConfig, float], winner: LoaderConfig) -> None:
    outcome = outcome_of(Bench(rates, noise=0.002).run(some_rounds([MANY, SOME, FEW])))
    assert outcome.winner == winner
    assert outcome.speedup is not None
    assert (outcome.speedup.low > 1) == (winner != BASELINE)
    assert winner not in outcome.as_fast
    assert all(side.num_workers > winner.num_workers for side in outcome.as_fast)


def test_as_fast_as_the_step_alone_in_two_rounds_is_at_the_ceiling_and_ends_them() -> None:
    # GIVEN a step that no loader can outrun
    rates = {BASELINE: 500.0, FEW: 996.0, MANY: 1000.0}
    rounds = Bench(rates).run(some_rounds([MANY, FEW], ceiling=1000.0))
    assert (rounds.ended, rounds.number) == (RoundsEnd.CEILING, 2)
    assert outcome_of(rounds).at_ceiling
    # BUT a side far above the step alone shows that this is no ceiling
    denied = Bench({**rates, MANY: 1300.0}).run(some_rounds([MANY, FEW], ceiling=1000.0))
    assert not outcome_of(denied).at_ceiling


def test_rounds_that_both_ran_in_decide() -> None:
    # GIVEN rounds that grew slow after one of the sides sat out
    both, alone = {SOME: 1000.0, MANY: 950.0, BASELINE: 500.0}, {SOME: 800.0, BASELINE: 400.0}
    opened = some_rounds([SOME, MANY])
    for rates in [both, both, alone, alone, alone]:
        opened.record([(config, measured(rate)) for config, rate in rates.items()], seconds=3.0)
    assert outcome_of(opened).winner == SOME


@pytest.mark.parametrize("is_late", [False, True])
def test_who_the_rounds_suggest_is_let_in_but_does_not_win_by_one_burst(is_late: bool) -> None:
    bench = Bench({BASELINE: 50.0, FEW: 80.0, SOME: 100.0}, noise=0.01)

    def nominate() -> list[LoaderConfig]:
        return [SOME, MANY] if bench.asked.count(FEW) == (2 if is_late else 1) else []

    rounds = bench.run(some_rounds([FEW]), budget_s=7.0 if is_late else math.inf, nominate=nominate)
    outcome = outcome_of(rounds)
    assert (bench.asked.count(SOME) == 1) is is_late
    assert MANY not in rounds.sides
    assert outcome.winner == (FEW if is_late else SOME)


# How long it takes


def test_a_clear_answer_takes_two_rounds_and_one_round_claims_nothing_narrow() -> None:
    rates = {BASELINE: 50.0, FEW: 100.0}
    rounds = Bench(rates, noise=0.005).run(some_rounds([FEW]))
    outcome = outcome_of(rounds)
    assert (rounds.number, rounds.ended) == (2, RoundsEnd.SAFE)
    assert outcome.speedup is not None
    assert 1 < outcome.speedup.low < 2.0 < outcome.speedup.high
    assert outcome.rate.low < 100 < outcome.rate.high
    # AND where there is time for one only, its rate has no limits
    rounds = Bench(rates).run(some_rounds([FEW]), budget_s=2.5)
    assert (rounds.number, rounds.ended) == (1, RoundsEnd.NO_TIME)
    assert not outcome_of(rounds).rate.is_telling
    assert some_rounds([FEW]).outcome() is None


EQUAL = {BASELINE: 100.0, FEW: 100.0, SOME: 100.0}


@pytest.mark.parametrize(("noise", "most"), [(0.01, 8), (0.05, 25), (0.2, MOST_ROUNDS)])
def test_a_tie_ends_when_no_pair_is_worth_its_seconds(noise: float, most: int) -> None:
    rounds = Bench(EQUAL, noise=noise).run(some_rounds([FEW, SOME]))
    assert 2 <= rounds.number <= most
    assert rounds.ended in (RoundsEnd.SAFE, RoundsEnd.NOT_WORTH_IT)


@pytest.mark.parametrize(
    ("rates", "slow"),
    [({BASELINE: 50.0, FEW: 98.5, SOME: 100.0}, BASELINE), ({BASELINE: 98.0, FEW: 60.0, SOME: 100.0}, FEW)],
    ids=["the baseline", "another side"],
)
def test_who_is_clearly_slower_sits_out(rates: Mapping[LoaderConfig, float], slow: LoaderConfig) -> None:
    bench, rounds = Bench(rates, noise=0.02), some_rounds([SOME, FEW])
    while rounds.number < 5:
        sides = rounds.entrants() if rounds.number < 2 else rounds._next()[0]
        rounds.record([(side, bench.burst(side)) for side in sides], float(len(sides)))
    assert bench.asked.count(slow) <= 2
    assert bench.asked.count(SOME) == 5
    assert outcome_of(rounds).speedup is not None


def test_a_rival_that_cannot_be_faster_is_not_run_again() -> None:
    # GIVEN a belief in which FEW is never slower than MANY, as its workers keep the step busy (B5)
    paths = np.log([100.0, 100.0, 50.0]) + 0.05 * np.random.default_rng(0).standard_normal((PATHS, 3))
    paths[:, 0] = np.maximum(paths[:, 0], paths[:, 1])
    fixed: Any = SimpleNamespace(draws=Draws(keys=(FEW, MANY, BASELINE), paths=paths, noise_sd=0.03))
    rounds = some_rounds([FEW, MANY], believe=lambda: fixed)
    bench = Bench({FEW: 100.0, MANY: 103.0, BASELINE: 50.0}, noise=0.03)
    bench.run(rounds)
    assert (rounds.ended, rounds.number) == (RoundsEnd.SAFE, 2)


# Failures


def test_a_side_that_keeps_failing_is_dropped_and_told_but_one_failure_is_forgiven() -> None:
    bench = Bench({BASELINE: 50.0, FEW: 90.0, SOME: BROKEN}, noise=0.01)
    outcome = outcome_of(bench.run(some_rounds([SOME, FEW])))
    assert bench.asked.count(SOME) <= MAX_FAILURES
    assert outcome.winner == FEW
    once = itertools.chain([BROKEN], itertools.repeat(100.0))
    assert outcome_of(Bench({BASELINE: 50.0, SOME: once.__next__}).run(some_rounds([SOME]))).winner == SOME


def test_a_baseline_that_fails_leaves_the_speed_up_unknown_and_where_all_fail_there_is_no_outcome() -> None:
    outcome = outcome_of(Bench({BASELINE: BROKEN, FEW: 100.0, SOME: 90.0}, noise=0.01).run(some_rounds([FEW, SOME])))
    assert (outcome.winner, outcome.speedup) == (FEW, None)
    bench = Bench({BASELINE: BROKEN, FEW: BROKEN})
    rounds = bench.run(some_rounds([FEW]))
    assert (rounds.outcome(), rounds.ended) == (None, RoundsEnd.ALL_FAILED)
    assert len(bench.asked) <= 2 * MAX_FAILURES


def test_a_side_off_the_grid_beside_neighbours_does_not_end_rounds_by_an_error() -> None:
    """Script B7 of the review: 17 workers by the rule, never searched, in rounds that neighbours disturbed."""
    space, context = Space(max_workers=24), Context(usable_cores=16)
    rule, trials = LoaderConfig(num_workers=17), list[Trial]()
    rounds = some_rounds([SOME, rule], believe=lambda: Belief(space, context, trials) if trials else None)
    for number, (sides, busy) in enumerate(
        [((BASELINE, SOME, rule), 0.5), ((BASELINE, SOME), 0.0), ((BASELINE, SOME), 0.5)]
    ):
        outcomes = [(side, replace(measured(100.0 + side.num_workers), foreign_cpu_share=busy)) for side in sides]
        rounds.record(outcomes, 1.0)
        trials += [Trial.of(10 * number + i, side, each, round=number) for i, (side, each) in enumerate(outcomes)]
        assert rounds.incumbent() is not None
        rounds.entrants()
    assert outcome_of(rounds).rounds[0].foreign_cpu_share == 0.5
