"""What runs next and when it ends: alone, in rounds, an end by evidence, failures survived."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from autotune_loader.diagnosis import Ended
from autotune_loader.search.belief import CERTAIN, MAX_FAILURES, Belief
from autotune_loader.search.space import Context, Space
from autotune_loader.search.turns import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    bursts_s,
    in_turns,
    is_at_ceiling,
    what_next,
)
from autotune_loader.values import Failure, Interval, LoaderConfig, Trial
from tests.support import SimulatedMachine, simulated_trials

OWN = LoaderConfig()
FEW, SOME, MANY = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
BROKEN, HANGS = (
    Failure(kind=kind, phase="batches", message="no") for kind in ("user_exception", "deadline")
)
BARE = dict.fromkeys(("service_s", "step_s", "receive_s", "samples"), 0)
SHAPE = simulated_trials(SimulatedMachine(), FEW)[0].measurement
SHAPE = replace(SHAPE, traces=(), **BARE)


class Job:
    """Configurations with given rates, and noise; a burst takes a second. No twin knows more."""

    def __init__(self, rates, *, noise=0.0, seconds=None, seed=0):
        self.rates, self.noise, self.seconds = rates, noise, seconds or {}
        self.rng = random.Random(seed)
        self.trials, self.asked = [], []

    def burst(self, config, round_=None):
        self.asked.append(config)
        outcome = self.rates[config]
        outcome = outcome() if callable(outcome) else outcome
        if not isinstance(outcome, Failure):
            rate = outcome * (1 + self.rng.gauss(0, self.noise))
            interval = Interval(value=rate, low=rate, high=rate, count=20)
            outcome = replace(SHAPE, samples_per_s=interval)
        took = self.seconds.get(config, 1.0)
        self.trials.append(Trial.of(len(self.trials), config, outcome, round=round_, seconds=took))

    def belief(self):
        space = Space(max_workers=0, also=tuple(self.rates))
        return Belief(space, Context(usable_cores=4), self.trials)

    def run(self, *first, budget_s=math.inf, **given):
        """From these bursts to the end, and why it ended."""
        for config in first:
            self.burst(config)
        while (belief := self.belief()).choice is not None:
            left_s = budget_s - sum(trial.seconds for trial in self.trials)
            found = what_next(belief, baseline=OWN, seconds_left=left_s, **given)
            for config in found.configs:
                self.burst(config, len(belief.rounds) if found.is_round else None)
            if found.stop:
                return found.stop
        return None

    @property
    def rounds(self):
        return len(self.belief().rounds)


WINNERS = {
    "of equals the cheapest": ({OWN: 50.0, FEW: 99.9, SOME: 100.0, MANY: 100.1}, FEW),
    "none that is slower": ({OWN: 50.0, FEW: 95.0, SOME: 100.0, MANY: 99.0}, SOME),
    "the caller's own": ({OWN: 100.0, FEW: 100.1, SOME: 100.0, MANY: 99.0}, OWN),
}


@pytest.mark.parametrize(("rates", "winner"), WINNERS.values(), ids=WINNERS)
def test_the_cheapest_of_the_fastest_is_chosen(rates, winner):
    job = Job(rates, noise=0.002)
    why, belief = job.run(SOME), job.belief()
    assert belief.choice == winner
    assert (belief.probability(winner) >= CERTAIN) == (why == "SAFE")
    assert why in ("SAFE", "EXPECTED")
    # THEN it ran in two rounds; what never ran runs by itself first, and nothing else runs alone
    assert sum(winner in each.rates for each in belief.rounds) >= LEAST_ROUNDS
    alone = [trial.config for trial in job.trials if trial.round is None]
    assert len(set(alone)) == len(alone) == len(rates)


def test_as_fast_as_the_step_alone_ends_it():
    job = Job({OWN: 500.0, FEW: 996.0, MANY: 1000.0}, noise=0.001)
    assert job.run(MANY, FEW, ceiling=1000.0) == "CEILING"


@pytest.mark.parametrize(
    ("rates", "many", "is_there"),
    [
        ((979.0, 981.0), 1150.0, True),
        ((978.0, 981.0), 1150.0, False),
        ((979.0, 981.0), 1151.0, False),
        ((1000.0,), 1150.0, False),
    ],
)
def test_two_bursts_show_that_the_ceiling_is_reached(rates, many, is_there):
    job = Job({FEW: itertools.chain(rates).__next__, MANY: many})
    for config in (MANY, MANY, *[FEW] * len(rates)):
        job.burst(config)
    assert is_at_ceiling(job.belief(), FEW, 1000.0) == is_there
    assert not is_at_ceiling(job.belief(), FEW, None)


@pytest.mark.parametrize(("noise", "most"), [(0.01, 8), (0.05, 25), (0.2, MOST_ROUNDS)])
def test_a_tie_ends_in_time(noise, most):
    job = Job(dict.fromkeys((OWN, FEW, SOME), 100.0), noise=noise)
    assert job.run(FEW, SOME) in ("SAFE", "EXPECTED", "ROUNDS")
    assert LEAST_ROUNDS <= job.rounds <= most


def test_a_run_has_at_most_40_rounds():
    job = Job({OWN: 100.0, FEW: 101.0, SOME: 102.0}, noise=0.1)
    job.run(FEW, SOME, least_rounds=MOST_ROUNDS - 1)
    assert job.rounds == MOST_ROUNDS - 1
    assert job.run(least_rounds=MOST_ROUNDS + 1) == Ended.ROUNDS.name
    assert job.rounds == MOST_ROUNDS
    # AND those of an earlier run do not count
    more = {"rounds_before": 1, "least_rounds": MOST_ROUNDS + 1}
    assert what_next(job.belief(), baseline=OWN, **more).is_round


@pytest.mark.parametrize(("failures", "ends"), [(7, False), (8, True)])
def test_eight_failures_in_a_row_end_it(failures, ends):
    broken = [LoaderConfig(num_workers=count) for count in range(1, failures + 1)]
    job = Job({OWN: 50.0, **dict.fromkeys(broken, BROKEN)})
    for config in (OWN, *broken):
        job.burst(config)
    assert (what_next(job.belief(), baseline=OWN).stop == "FAILING") == ends


def test_ten_percent_replace_ones_own_once_known():
    chosen = 0
    for seed in range(20):
        job = Job({OWN: 100.0, FEW: 110.0}, noise=0.06, seed=seed)
        why, belief = job.run(FEW, OWN), job.belief()
        chosen += belief.choice == FEW
        # THEN no search ends by expectation while nobody knows which of the two is faster
        is_known = belief.is_faster(FEW, OWN) >= CERTAIN or belief.loss(OWN) <= belief.tolerance
        assert belief.choice == OWN or why != "EXPECTED" or is_known
    assert chosen >= 19


@pytest.mark.parametrize(("own", "runs"), [(50.0, LEAST_ROUNDS + 1), (96.5, LEAST_ROUNDS + 4)])
def test_ones_own_sits_out_once_clearly_slower(own, runs):
    job = Job({OWN: own, FEW: 97.5, SOME: 100.0}, noise=0.002)
    job.run(FEW, SOME, least_rounds=LEAST_ROUNDS + 3)
    assert job.rounds == LEAST_ROUNDS + 3
    assert job.asked.count(OWN) == runs


@pytest.mark.parametrize(
    ("rounds", "left_s", "sides"),
    [
        (0, 1.0, {OWN, FEW, SOME}), (0, 0.9, {FEW, SOME}), (0, 0.0, {FEW, SOME}), (0, -0.1, set()),
        (1, 3.0, {OWN, FEW, SOME}), (1, 2.9, {FEW, SOME}), (1, 2.0, {FEW, SOME}), (1, 1.9, set()),
    ],
)  # fmt: skip
def test_a_round_has_the_sides_that_fit(rounds, left_s, sides):
    # GIVEN bursts of 1 s, and a first round that may overrun by 2 s
    job = Job({OWN: 96.5, FEW: 97.5, SOME: 100.0})
    for round_ in (None, *range(rounds)):
        for config in job.rates:
            job.burst(config, round_)
    found = what_next(job.belief(), baseline=OWN, seconds_left=left_s)
    assert {*found.configs} == sides
    assert found.stop == (None if sides else "BUDGET")


def test_a_rival_is_another():
    job = Job({OWN: 50.0, FEW: 100.0})
    job.burst(FEW)
    assert job.belief().rival(FEW) == OWN
    alone = Belief(Space(), Context(usable_cores=4), job.trials, is_open=False)
    assert alone.rival(FEW) is None


def test_rounds_of_many_hold_what_may_be_faster():
    # GIVEN what another sampler has tried: 20 configurations, of which the two best are 3% apart
    tried = [LoaderConfig(num_workers=count) for count in range(1, 20)]
    rates = {config: 100.0 - 3.0 * place for place, config in enumerate(tried)}
    job = Job({OWN: 40.0, **rates}, noise=0.04)
    job.run(OWN, *tried)
    # THEN each round has two of the fast, and none is of the choice and the caller's own alone
    fast = [sum(config != OWN for config in each.rates) for each in job.belief().rounds]
    assert len(fast) >= LEAST_ROUNDS
    assert min(fast) >= 2


def test_rounds_go_on_while_they_contradict_the_choice():
    # GIVEN a lucky burst of some workers, and rounds in which few were 5% faster on average
    job = Job({OWN: 50.0, FEW: 90.0, SOME: 110.0})
    for number, few in enumerate((None, 110.0, 100.0)):
        if few is not None:
            job.rates = {OWN: 50.0, FEW: few, SOME: 100.0}
        for config in job.rates:
            job.burst(config, number - 1 if number else None)
        belief = job.belief()
        assert belief.contradiction(SOME) == (FEW if number == 2 else None)  # one round is none
    assert belief.choice == SOME
    assert belief.loss(SOME) <= belief.tolerance
    assert belief.contradiction(OWN) == FEW
    assert belief.contradiction(FEW) is None
    # THEN the search does not end, and the next round has both
    found = what_next(belief, baseline=OWN)
    assert found.is_round
    assert {FEW, SOME} <= {*found.configs}


SLOW = {OWN: 8.0, SOME: 3.0, FEW: 3.0}
BUDGETS = {
    # budget, seconds of bursts: why it ends, after how many rounds, and seconds at most
    "a round": (20.0, {}, "SAFE", LEAST_ROUNDS, 20.0),
    "no round, but a burst of the caller's own": (12.0, SLOW, "BUDGET", 0, 14.0),
    "always a second burst": (1.5, {}, "BUDGET", 0, 4.0),
}


@pytest.mark.parametrize("case", BUDGETS.values(), ids=BUDGETS)
def test_what_does_not_fit_is_not_begun(case):
    budget_s, seconds, why, rounds, most_s = case
    job = Job({OWN: 5.0, SOME: 100.0, FEW: 50.0}, noise=0.001, seconds=seconds)
    assert job.run(SOME, budget_s=budget_s) == why
    assert job.rounds == rounds
    assert sum(trial.seconds for trial in job.trials) <= most_s
    assert len(set(job.asked)) >= 2


def test_a_burst_takes_what_earlier_ones_took():
    job = Job({SOME: 100.0, FEW: 50.0, OWN: 2.0}, seconds={SOME: 2.0, FEW: 3.0})
    job.burst(SOME)
    job.burst(FEW)
    belief = job.belief()
    assert bursts_s(belief, [SOME, FEW, SOME]) == 5.0
    assert bursts_s(belief, [MANY]) == 3.0
    # AND without workers three batches at the rate that is believed
    slow_s = 0.5 + 3 * SHAPE.batch_size / belief.predicted(OWN)
    assert bursts_s(belief, [OWN]) == pytest.approx(slow_s)


def test_each_is_first_as_often():
    assert [in_turns("ab", number) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert in_turns("abc", 0) != in_turns("abc", 2) != in_turns("abc", 4)


def after(*outcomes):
    """These, and then the last again and again."""
    return lambda: itertools.chain(outcomes, itertools.repeat(outcomes[-1])).__next__


FAILING = {
    # rates beside those of the caller's own and of few workers: who is chosen, and bursts of some
    "what never worked": ({SOME: lambda: BROKEN}, FEW, 1),
    "once": ({SOME: after(100.0, BROKEN, 100.0)}, SOME, 40),
    "a hang": ({SOME: after(100.0, HANGS, 100.0)}, FEW, 2),
    "again and again": ({SOME: after(100.0, BROKEN)}, FEW, 1 + MAX_FAILURES),
    "the caller's own": ({OWN: lambda: BROKEN, SOME: lambda: 80.0}, FEW, 40),
    "all": (dict.fromkeys((OWN, FEW, SOME), lambda: BROKEN), None, 1),
}


@pytest.mark.parametrize(("rates", "winner", "runs"), FAILING.values(), ids=FAILING)
def test_who_keeps_failing_is_out(rates, winner, runs):
    job = Job({OWN: 50.0, FEW: 90.0, **{config: make() for config, make in rates.items()}})
    assert (job.run(OWN, FEW, SOME) is None) == (winner is None)
    assert job.belief().choice == winner
    assert job.asked.count(SOME) <= runs
