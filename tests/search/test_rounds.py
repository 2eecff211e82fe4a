"""Paired rounds: no claim without difference, the cheapest of equals, an end by evidence, and failures survived."""

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from autotune_loader.search.belief import Belief
from autotune_loader.search.draws import PATHS, Draws
from autotune_loader.search.rounds import MAX_FAILURES, MOST_ROUNDS, Rounds, RoundsEnd
from autotune_loader.search.space import Context, Space
from autotune_loader.values import Failure, Interval, LoaderConfig, Trial
from tests.support import SimulatedMachine, simulated_trials

BASELINE = LoaderConfig()
FEW, SOME, MANY = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
BROKEN = Failure(kind="crashed", phase="batches", message="no")
SHAPE = simulated_trials(SimulatedMachine(), FEW)[0].measurement


def measured(rate, **changes):
    interval = Interval(value=rate, low=rate * 0.98, high=rate * 1.02, count=20)
    return replace(SHAPE, traces=(), samples_per_s=interval, **changes)


def beside_baseline(*sides, **more):
    return Rounds(sides, BASELINE, **{"cost": lambda config: (config.num_workers,), **more})


class Bench:
    """Runs rounds whose bursts have given rates, with noise; each takes a second."""

    def __init__(self, rates, *, noise=0.0):
        self.rates, self.noise, self.rng = rates, noise, random.Random(0)
        self.asked = []

    def burst(self, side):
        self.asked.append(side)
        rate = self.rates[side]
        rate = rate() if callable(rate) else rate
        return rate if isinstance(rate, Failure) else measured(rate * (1 + self.rng.gauss(0, self.noise)))

    def run(self, rounds, *, budget_s=math.inf, nominate=list):
        while sides := rounds.entrants(budget_s - len(self.asked)):
            rounds.record([(side, self.burst(side)) for side in sides], float(len(sides)))
            rounds.admit(nominate)
        return rounds


@pytest.mark.parametrize(
    ("rates", "winner"),
    [
        ({BASELINE: 50.0, FEW: 99.9, SOME: 100.0, MANY: 100.1}, FEW),
        ({BASELINE: 50.0, FEW: 95.0, SOME: 100.0, MANY: 99.0}, SOME),
        ({BASELINE: 100.0, FEW: 100.1, SOME: 100.0, MANY: 99.0}, BASELINE),
    ],
    ids=["of equals the cheapest", "not one that is slower than the tolerance", "the baseline itself"],
)
def test_the_cheapest_of_the_fastest_wins(rates, winner):
    outcome = Bench(rates, noise=0.002).run(beside_baseline(MANY, SOME, FEW)).outcome()
    assert outcome.winner == winner
    assert (outcome.speedup.low > 1) == (winner != BASELINE)
    assert all(side.num_workers > winner.num_workers for side in outcome.as_fast)


@pytest.mark.parametrize("many", [1000.0, 1300.0], ids=["at the ceiling", "one far above it denies it"])
def test_as_fast_as_the_step_alone_in_two_rounds_is_at_the_ceiling_and_ends_them(many):
    rounds = Bench({BASELINE: 500.0, FEW: 996.0, MANY: many}).run(beside_baseline(MANY, FEW, ceiling=1000.0))
    is_there = many == 1000.0
    assert rounds.outcome().at_ceiling == is_there
    assert ((rounds.ended, rounds.number) == (RoundsEnd.CEILING, 2)) == is_there


def test_rounds_that_both_ran_in_decide():
    # GIVEN rounds that grew slow after one of the sides sat out
    both, alone = {SOME: 1000.0, MANY: 950.0, BASELINE: 500.0}, {SOME: 800.0, BASELINE: 400.0}
    rounds = beside_baseline(SOME, MANY)
    for rates in [both, both, alone, alone, alone]:
        rounds.record([(config, measured(rate)) for config, rate in rates.items()], seconds=3.0)
    assert rounds.outcome().winner == SOME


@pytest.mark.parametrize(("after", "budget_s", "winner"), [(1, math.inf, SOME), (2, 7.0, FEW)], ids=["in time", "late"])
def test_who_the_rounds_suggest_is_let_in_but_does_not_win_by_one_burst(after, budget_s, winner):
    bench, rounds = Bench({BASELINE: 50.0, FEW: 80.0, SOME: 100.0}, noise=0.01), beside_baseline(FEW)
    bench.run(rounds, budget_s=budget_s, nominate=lambda: [SOME, MANY] if bench.asked.count(FEW) == after else [])
    assert (bench.asked.count(SOME) == 1) == (winner == FEW)
    assert MANY not in rounds.sides
    assert rounds.outcome().winner == winner


def test_a_clear_answer_takes_two_rounds_and_one_round_claims_nothing_narrow():
    rates = {BASELINE: 50.0, FEW: 100.0}
    rounds = Bench(rates, noise=0.005).run(beside_baseline(FEW))
    outcome = rounds.outcome()
    assert (rounds.number, rounds.ended) == (2, RoundsEnd.SAFE)
    assert 1 < outcome.speedup.low < 2.0 < outcome.speedup.high
    assert outcome.rate.low < 100 < outcome.rate.high
    # AND where there is time for one only, its rate has no limits
    rounds = Bench(rates).run(beside_baseline(FEW), budget_s=2.5)
    assert (rounds.number, rounds.ended) == (1, RoundsEnd.NO_TIME)
    assert not rounds.outcome().rate.is_telling


@pytest.mark.parametrize(("noise", "most"), [(0.01, 8), (0.05, 25), (0.2, MOST_ROUNDS)])
def test_a_tie_ends_when_no_pair_is_worth_its_seconds(noise, most):
    rounds = Bench(dict.fromkeys((BASELINE, FEW, SOME), 100.0), noise=noise).run(beside_baseline(FEW, SOME))
    assert 2 <= rounds.number <= most
    assert rounds.ended in (RoundsEnd.SAFE, RoundsEnd.NOT_WORTH_IT)


@pytest.mark.parametrize(
    ("rates", "slow"),
    [({BASELINE: 50.0, FEW: 98.5, SOME: 100.0}, BASELINE), ({BASELINE: 98.0, FEW: 60.0, SOME: 100.0}, FEW)],
    ids=["the baseline", "another side"],
)
def test_who_is_clearly_slower_sits_out(rates, slow):
    bench, rounds = Bench(rates, noise=0.02), beside_baseline(SOME, FEW)
    while rounds.number < 5:
        sides = rounds.entrants() if rounds.number < 2 else rounds._next()[0]
        rounds.record([(side, bench.burst(side)) for side in sides], float(len(sides)))
    assert bench.asked.count(slow) <= 2
    assert bench.asked.count(SOME) == 5
    assert rounds.outcome().speedup is not None


def test_a_rival_that_cannot_be_faster_is_not_run_again():
    # GIVEN a belief in which FEW is never slower than MANY, as its workers keep the step busy (B5)
    paths = np.log([100.0, 100.0, 50.0]) + 0.05 * np.random.default_rng(0).standard_normal((PATHS, 3))
    paths[:, 0] = np.maximum(paths[:, 0], paths[:, 1])
    fixed = SimpleNamespace(draws=Draws(keys=(FEW, MANY, BASELINE), paths=paths, noise_sd=0.03))
    bench = Bench({FEW: 100.0, MANY: 103.0, BASELINE: 50.0}, noise=0.03)
    rounds = bench.run(beside_baseline(FEW, MANY, believe=lambda: fixed))
    assert (rounds.ended, rounds.number) == (RoundsEnd.SAFE, 2)


@pytest.mark.parametrize(
    ("rates", "winner", "runs"),
    [
        ({BASELINE: 50.0, FEW: 90.0, SOME: BROKEN}, FEW, MAX_FAILURES),
        ({BASELINE: 50.0, SOME: itertools.chain([BROKEN], itertools.repeat(100.0)).__next__}, SOME, MOST_ROUNDS),
        ({BASELINE: BROKEN, FEW: 100.0, SOME: 90.0}, FEW, MOST_ROUNDS),
        ({BASELINE: BROKEN, SOME: BROKEN}, None, MAX_FAILURES),
    ],
    ids=["a side", "a side once", "the baseline", "all"],
)
def test_who_keeps_failing_is_out_but_one_failure_is_forgiven(rates, winner, runs):
    bench = Bench(rates, noise=0.01)
    rounds = bench.run(beside_baseline(*rates))
    outcome = rounds.outcome()
    assert (outcome and outcome.winner) == winner
    assert bench.asked.count(SOME) <= runs
    assert (rounds.ended is RoundsEnd.ALL_FAILED) == (winner is None)
    # AND the speed-up over a baseline that failed is unknown
    assert winner is None or (outcome.speedup is None) == (rates[BASELINE] is BROKEN)


def test_a_side_off_the_grid_beside_neighbours_does_not_end_rounds_by_an_error():
    """17 workers by the rule, never searched, in rounds that neighbours disturbed (B7)."""
    space, context = Space(max_workers=24), Context(usable_cores=16)
    rule, trials = LoaderConfig(num_workers=17), list[Trial]()
    rounds = beside_baseline(SOME, rule, believe=lambda: Belief(space, context, trials) if trials else None)
    runs = [((BASELINE, SOME, rule), 0.5), ((BASELINE, SOME), 0.0), ((BASELINE, SOME), 0.5)]
    for number, (sides, busy) in enumerate(runs):
        outcomes = [(side, measured(100.0 + side.num_workers, foreign_cpu_share=busy)) for side in sides]
        rounds.record(outcomes, 1.0)
        trials += [Trial.of(10 * number + i, side, each, round=number) for i, (side, each) in enumerate(outcomes)]
        assert rounds.incumbent() is not None
        rounds.entrants()
    assert rounds.outcome().rounds[0].foreign_cpu_share == 0.5
