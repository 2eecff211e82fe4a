"""What runs next and when it ends: finalists by themselves and in rounds, an end by evidence, failures survived."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from autotune_loader.search.belief import CERTAIN, MAX_FAILURES, Belief
from autotune_loader.search.space import Context, Space
from autotune_loader.search.turns import LEAST_ROUNDS, MOST_ROUNDS, is_at_ceiling, what_next
from autotune_loader.values import Failure, Interval, LoaderConfig, Trial
from tests.support import SimulatedMachine, simulated_trials

OWN = LoaderConfig()
FEW, SOME, MANY = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
BROKEN, HANGS = (
    Failure(kind=kind, phase="batches", message="no") for kind in ("user_exception", "deadline")
)
SHAPE = simulated_trials(SimulatedMachine(), FEW)[0].measurement
BARE = dict.fromkeys(("service_s", "step_s", "receive_s", "samples"), 0)


class Job:
    """Configurations with given rates, and noise; each burst takes a second. Nothing else is known, and no twin."""

    def __init__(self, rates, *, noise=0.0, seconds=None):
        self.rates, self.noise, self.rng, self.seconds = (
            rates,
            noise,
            random.Random(0),
            seconds or {},
        )
        self.trials, self.asked = [], []

    def burst(self, config, round_=None):
        self.asked.append(config)
        rate = self.rates[config]
        rate = rate() if callable(rate) else rate
        outcome = rate
        if not isinstance(rate, Failure):
            rate *= 1 + self.rng.gauss(0, self.noise)
            interval = Interval(value=rate, low=rate, high=rate, count=20)
            outcome = replace(SHAPE, traces=(), samples_per_s=interval, **BARE)
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


@pytest.mark.parametrize(
    ("rates", "winner"),
    [
        ({OWN: 50.0, FEW: 99.9, SOME: 100.0, MANY: 100.1}, FEW),
        ({OWN: 50.0, FEW: 95.0, SOME: 100.0, MANY: 99.0}, SOME),
        ({OWN: 100.0, FEW: 100.1, SOME: 100.0, MANY: 99.0}, OWN),
    ],
    ids=["of equals the cheapest", "not one that is slower than the tolerance", "the caller's own"],
)
def test_the_cheapest_of_the_fastest_is_chosen_and_runs_in_two_rounds(rates, winner):
    job = Job(rates, noise=0.002)
    why, belief = job.run(SOME), job.belief()
    assert belief.choice == winner
    assert (belief.probability(winner) >= CERTAIN) == (why == "SAFE")
    assert why in ("SAFE", "EXPECTED")
    assert sum(winner in each.rates for each in belief.rounds) >= LEAST_ROUNDS
    # THEN what never ran runs by itself first, and nothing else runs alone
    alone = [trial.config for trial in job.trials if trial.round is None]
    assert len(set(alone)) == len(alone) == len(rates)


@pytest.mark.parametrize(
    "many", [1000.0, 1300.0], ids=["at the ceiling", "one far above it denies it"]
)
def test_as_fast_as_the_step_alone_ends_the_search(many):
    job = Job({OWN: 500.0, FEW: 996.0, MANY: many}, noise=0.001)
    is_there = many == 1000.0
    assert (job.run(MANY, FEW, ceiling=1000.0) == "CEILING") == is_there
    assert is_at_ceiling(job.belief(), FEW, 1000.0) == is_there


@pytest.mark.parametrize(("noise", "most"), [(0.01, 8), (0.05, 25), (0.2, MOST_ROUNDS)])
def test_a_tie_ends_when_no_pair_is_worth_its_seconds(noise, most):
    job = Job(dict.fromkeys((OWN, FEW, SOME), 100.0), noise=noise)
    assert job.run(FEW, SOME) in ("SAFE", "EXPECTED", "ROUNDS")
    assert LEAST_ROUNDS <= job.rounds <= most


@pytest.mark.parametrize("seed", range(20))
def test_while_the_callers_own_may_lose_much_rounds_go_on_until_it_is_known_which_is_faster(seed):
    job = Job({OWN: 100.0, FEW: 106.0}, noise=0.06)
    job.rng.seed(seed)
    why, belief = job.run(FEW, OWN), job.belief()
    is_known = (
        belief.choice == OWN
        or belief.is_faster(FEW, OWN) >= CERTAIN
        or belief.loss(OWN) <= belief.tolerance
    )
    assert (
        why == "SAFE"
        or (why == "EXPECTED" and is_known)
        or (why == "ROUNDS" and job.rounds == MOST_ROUNDS)
    )


def test_the_callers_own_sits_out_once_it_is_clearly_slower():
    job = Job({OWN: 50.0, FEW: 97.0, SOME: 100.0}, noise=0.01)
    job.run(FEW, SOME, least_rounds=LEAST_ROUNDS + 3)
    assert job.rounds >= LEAST_ROUNDS + 3
    assert job.asked.count(OWN) <= LEAST_ROUNDS + 1


def test_in_a_study_of_many_configurations_rounds_hold_the_choice_and_what_may_be_faster():
    # GIVEN what another sampler has tried: 20 configurations, of which the two best are 3% apart
    tried = [LoaderConfig(num_workers=count) for count in range(1, 20)]
    job = Job(
        {OWN: 40.0, **{config: 100.0 - 3.0 * place for place, config in enumerate(tried)}},
        noise=0.04,
    )
    for config in [OWN, *tried]:
        job.burst(config)
    job.run()
    # THEN each round has two of those that are nearly as fast, and none is of the choice and the caller's own alone
    fast = [sum(config != OWN for config in each.rates) for each in job.belief().rounds]
    assert len(fast) >= LEAST_ROUNDS
    assert min(fast) >= 2


def test_rounds_go_on_while_they_contradict_the_choice_and_hold_what_contradicts_it():
    job = Job({OWN: 50.0, FEW: 95.0, SOME: 100.0})
    for number in range(2):
        for config, rate in ((OWN, 50.0), (FEW, 110.0 - 5.0 * number), (SOME, 100.0)):
            job.rates[config] = rate
            job.burst(config, number)
    belief = job.belief()
    assert (belief.contradiction(SOME), belief.contradiction(FEW)) == (FEW, None)
    assert belief.contradiction(OWN) == FEW


BUDGETS = {
    "a round": (20.0, {}, "SAFE", LEAST_ROUNDS, 20.0),
    "no second round": (6.5, {}, "BUDGET", 1, 8.5),
    "no round, but a burst of the caller's own": (
        12.0,
        {OWN: 8.0, SOME: 3.0, FEW: 3.0},
        "BUDGET",
        0,
        14.0,
    ),
    "always a second burst": (1.5, {}, "BUDGET", 0, 4.0),
}


@pytest.mark.parametrize(
    ("budget_s", "seconds", "why", "rounds", "most_s"), BUDGETS.values(), ids=BUDGETS
)
def test_what_does_not_fit_into_the_budget_is_not_begun(budget_s, seconds, why, rounds, most_s):
    job = Job({OWN: 5.0, SOME: 100.0, FEW: 50.0}, noise=0.001, seconds=seconds)
    assert job.run(SOME, budget_s=budget_s) == why
    assert job.rounds == rounds
    assert sum(trial.seconds for trial in job.trials) <= most_s
    assert len(set(job.asked)) >= 2


@pytest.mark.parametrize(
    ("rates", "winner", "runs"),
    [
        ({OWN: 50.0, FEW: 90.0, SOME: BROKEN}, FEW, 1),
        (
            {
                OWN: 50.0,
                FEW: 90.0,
                SOME: itertools.chain([100.0, BROKEN], itertools.repeat(100.0)).__next__,
            },
            SOME,
            40,
        ),
        (
            {
                OWN: 50.0,
                FEW: 90.0,
                SOME: itertools.chain([100.0, HANGS], itertools.repeat(100.0)).__next__,
            },
            FEW,
            2,
        ),
        (
            {
                OWN: 50.0,
                FEW: 90.0,
                SOME: itertools.chain([100.0], itertools.repeat(BROKEN)).__next__,
            },
            FEW,
            1 + MAX_FAILURES,
        ),
        ({OWN: BROKEN, FEW: 100.0, SOME: 90.0}, FEW, 40),
        ({OWN: BROKEN, SOME: BROKEN}, None, 1),
    ],
    ids=["what never worked", "once", "a hang", "again and again", "the caller's own", "all"],
)
def test_who_keeps_failing_is_out_but_one_failure_is_forgiven(rates, winner, runs):
    job = Job(rates, noise=0.002)
    assert (job.run(*rates) is None) == (winner is None)
    assert job.belief().choice == winner
    assert job.asked.count(SOME) <= runs
