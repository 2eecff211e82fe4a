"""Paired rounds: no claim without difference, the cheapest of equals, time kept, and failures survived."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from autotune_loader.decision.posterior import Posterior, Seen
from autotune_loader.decision.race import MAX_FAILURES, MIN_ROUNDS, PATIENT_ROUNDS, Race, RaceRules
from autotune_loader.decision.space import Space
from autotune_loader.tuning import burst_source
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.finals import run_rounds
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

BASELINE = LoaderConfig()
FEW, SOME, MANY = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
BROKEN = Failure(kind="crashed", phase="batches", message="no")
BURST_S = 1.0
SHAPE = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(FEW, BurstPlan(max_s=0.3, min_s=0.1))


class RatedProbe:
    """Answers with given rates and noise; a burst takes a second of the clock."""

    def __init__(self, rates, *, noise=0.0):
        self.rates, self.noise = rates, noise
        self.clock, self.rng = FakeClock(), random.Random(0)
        self.asked, self.plans = [], []

    def burst(self, config, plan):
        self.asked.append(config)
        self.plans.append(plan)
        self.clock.advance(BURST_S)
        rate = self.rates[config]
        rate = rate() if callable(rate) else rate
        if isinstance(rate, Failure):
            return rate
        rate *= 1 + self.rng.gauss(0, self.noise)
        return replace(SHAPE, samples_per_s=Interval(value=rate, low=rate * 0.98, high=rate * 1.02, count=20))


def a_race(candidates, prior=None, **rules):
    """A race by the rounds alone, or with what was believed before and what the rounds make of that."""

    def learnt():
        seen = [
            (prior.configs.index(config), np.log(rate), number)
            for number, each in enumerate(running.usable())
            for config, rate in each.rates.items()
        ]
        if not seen:
            return prior
        where, logs, numbers = map(np.array, zip(*seen, strict=True))
        return prior.after(Seen(where=where, logs=logs, variances=np.full(len(seen), 0.01**2), rounds=numbers))

    rules = {"tolerance": 0.02, "patience_s": 1000.0, "cost": lambda config: (config.num_workers,), **rules}
    running = Race(candidates, BASELINE, RaceRules(**rules), lambda: prior and learnt())
    return running


def race(probe, candidates, *, budget_s=1000.0, prior=None, nominate=list, **rules):
    """The outcome of rounds that are run between these and the baseline."""
    running = a_race(candidates, prior, **rules)

    def seconds_left():
        return budget_s - probe.clock()

    def learn(gathered):
        if running.is_admitting():
            running.admit(nominate())

    context = TwinContext(usable_cores=64, consumer_cores=1.0)
    source = BurstSource(probe, Space(max_workers=8), context, [], seconds_left)
    run_rounds(running, source, seconds_left=seconds_left, seed=0, learn=learn, on_round=lambda *_: None)
    return running.outcome()


def known(rates, sd):
    """A search that believes in these rates by configuration, so surely."""
    size, mean = len(rates), np.log(list(rates.values()))
    return Posterior(configs=tuple(rates), mean=mean, covariance=sd**2 * np.eye(size), noise_sd=0.03)


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
def test_the_cheapest_of_the_fastest_wins(rates, winner):
    outcome = race(RatedProbe(rates, noise=0.002), [MANY, SOME, FEW])
    assert outcome.winner == winner
    assert (outcome.speedup.low > 1) == (winner != BASELINE)


def test_as_fast_as_the_step_alone_in_two_rounds_is_at_the_ceiling():
    # GIVEN a step that no loader can outrun, and time for two rounds
    rates = {BASELINE: 999.0, FEW: 998.0, MANY: 1000.0}
    at_ceiling = {"ceiling": lambda config: 1000.0}
    outcome = race(RatedProbe(rates), [MANY, FEW], budget_s=6.5, **at_ceiling)
    # THEN no workers are as good as many
    assert (outcome.winner, outcome.at_ceiling, len(outcome.rounds)) == (BASELINE, True, 2)
    # BUT a candidate far above the step alone shows that this is no ceiling
    assert not race(RatedProbe({**rates, MANY: 1300.0}), [MANY, FEW], **at_ceiling).at_ceiling
    # AND one that is slower than the tolerance does not win for being near it
    assert race(RatedProbe({**rates, BASELINE: 955.0}), [MANY, FEW], **at_ceiling).winner == FEW


UNSURE = known({SOME: 900.0, MANY: 900.0, BASELINE: 900.0}, sd=0.3)
DISTURBED = [(336.0, 343.0, 228.0), (216.0, 309.0, 238.0), (237.0, 296.0, 253.0)]


def grew_slow(faster, other):
    """Two rounds in which one was 5 % faster, and three without the other in which everything was 20 % slower."""
    return [{faster: 1000.0, other: 950.0, BASELINE: 500.0}] * 2 + [{faster: 800.0, BASELINE: 400.0}] * 3


@pytest.mark.parametrize(
    ("prior", "rounds", "winners"),
    [
        *((prior, grew_slow(SOME, MANY), [SOME]) for prior in (None, UNSURE)),
        *((prior, grew_slow(MANY, SOME), [MANY]) for prior in (None, UNSURE)),
        # a belief in SOME, whose bursts were disturbed in two of three rounds, so that the baseline was faster there
        (
            known({SOME: 340.0, MANY: 330.0, BASELINE: 250.0}, sd=0.06),
            [dict(zip((SOME, MANY, BASELINE), each, strict=True)) for each in DISTURBED],
            [SOME, MANY],
        ),
        # a search that holds SOME for 10 % faster than FEW, which are as fast in every round
        (
            known({FEW: 100.0, SOME: 110.0, BASELINE: 50.0}, sd=0.06),
            [{FEW: 100.0, SOME: 100.0, BASELINE: 50.0}] * 4,
            [FEW],
        ),
    ],
)
def test_rounds_that_both_ran_in_decide_and_not_what_a_search_believed(prior, rounds, winners):
    opened = a_race(list(rounds[0]), prior)
    for rates in rounds:
        measured = [(c, replace(SHAPE, samples_per_s=replace(SHAPE.samples_per_s, value=r))) for c, r in rates.items()]
        opened.record(measured, seconds=3.0)
    assert opened.outcome().winner in winners


def test_a_belief_stands_against_scattered_rounds_but_not_against_all_of_them():
    prior = known({MANY: 99.0, SOME: 103.0, BASELINE: 50.0}, sd=0.03)
    always, sometimes = itertools.repeat(120.0), itertools.cycle([120.0, 90.0, 90.0])
    for rates, winner in ((always, MANY), (sometimes, SOME)):
        probe = RatedProbe({BASELINE: 50.0, MANY: rates.__next__, SOME: 100.0}, noise=0.01)
        assert race(probe, [SOME, MANY], prior=prior, budget_s=60.0).winner == winner


@pytest.mark.parametrize("is_late", [False, True])
def test_who_the_rounds_make_a_candidate_is_let_in_but_does_not_win_by_one_burst(is_late):
    # GIVEN a configuration that the search did not send to the finals, and that becomes a candidate at once or for one round
    probe = RatedProbe({BASELINE: 50.0, FEW: 80.0, SOME: 100.0}, noise=0.01)
    prior = known({FEW: 80.0, SOME: 100.0, BASELINE: 50.0}, sd=0.03)

    def nominate():
        return [SOME] if probe.asked.count(FEW) == (2 if is_late else 1) else []

    limits = {"patience_s": 6.0, "budget_s": 8.5} if is_late else {}
    outcome = race(probe, [FEW], prior=prior, nominate=nominate, **limits)
    assert (probe.asked.count(SOME) == 1) is is_late
    assert outcome.winner == (FEW if is_late else SOME)
    assert outcome.speedup.count >= 2


# How long it takes


def test_a_clear_answer_takes_few_rounds_and_one_round_claims_nothing():
    rates = {BASELINE: 50.0, FEW: 100.0}
    outcome = race(RatedProbe(rates, noise=0.005), [FEW])
    assert 1 < outcome.speedup.low < 2.0 < outcome.speedup.high
    assert outcome.rate.low < 100 < outcome.rate.high
    assert len(outcome.rounds) == MIN_ROUNDS
    outcome = race(RatedProbe(rates), [FEW], budget_s=2.5)
    assert (len(outcome.rounds), outcome.speedup) == (1, None)
    assert outcome.rate.low <= 100 <= outcome.rate.high
    assert race(RatedProbe(rates), [FEW], budget_s=-1.0) is None


EQUAL = {BASELINE: 100.0, FEW: 100.0, SOME: 100.0}


@pytest.mark.parametrize("budget_s", [3, 7, 20, 45])
def test_no_round_begins_that_would_not_fit(budget_s):
    # GIVEN rounds of three seconds that leave the question open
    probe = RatedProbe(EQUAL, noise=0.05)
    race(probe, [FEW, SOME], budget_s=budget_s)
    assert probe.clock() <= budget_s


def test_patience_and_a_limit_end_open_questions_but_not_before_the_first_rounds(monkeypatch):
    for rates, noise in ((EQUAL, 0.05), ({BASELINE: BROKEN, FEW: 80.0, SOME: 81.0}, 0.01)):
        assert len(race(RatedProbe(rates, noise=noise), [FEW, SOME], patience_s=0.0).rounds) == PATIENT_ROUNDS
    monkeypatch.setattr("autotune_loader.decision.race.MAX_ROUNDS", 20)
    outcome = race(RatedProbe(EQUAL, noise=0.2), [FEW, SOME], budget_s=1e9, patience_s=1e9)
    assert len(outcome.rounds) == 20


@pytest.mark.parametrize(
    ("rates", "slow"),
    [({BASELINE: 50.0, FEW: 98.5, SOME: 100.0}, BASELINE), ({BASELINE: 99.0, FEW: 60.0, SOME: 100.0}, FEW)],
    ids=["the baseline", "a candidate"],
)
def test_who_is_clearly_slower_sits_out(rates, slow):
    probe = RatedProbe(rates, noise=0.01)
    outcome = race(probe, [SOME, FEW])
    assert probe.asked.count(slow) < len(outcome.rounds)
    assert outcome.speedup is not None


def test_beside_the_best_its_strongest_rival_runs_again():
    # GIVEN bursts that scatter too much for one round to tell, and time for two
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0, SOME: 97.0, MANY: 88.0})
    race(probe, [MANY, SOME, FEW], budget_s=7.5, noise_sd=0.1)
    assert [probe.asked.count(config) for config in (FEW, SOME, MANY)] == [2, 2, 1]


# Failures


def test_a_finalist_that_keeps_failing_is_dropped_and_named_but_one_failure_is_forgiven():
    probe = RatedProbe({BASELINE: 50.0, FEW: 90.0, SOME: BROKEN}, noise=0.01)
    outcome = race(probe, [SOME, FEW])
    assert probe.asked.count(SOME) == MAX_FAILURES
    assert outcome.winner == FEW
    assert any(str(SOME) in note and "finals" in note for note in outcome.notes)
    once = itertools.chain([BROKEN], itertools.repeat(100.0))
    assert race(RatedProbe({BASELINE: 50.0, SOME: once.__next__}), [SOME]).winner == SOME


def test_a_baseline_that_fails_leaves_the_speed_up_unknown_and_where_all_fail_there_is_no_outcome():
    outcome = race(RatedProbe({BASELINE: BROKEN, FEW: 100.0, SOME: 90.0}, noise=0.01), [FEW, SOME])
    assert (outcome.winner, outcome.speedup) == (FEW, None)
    probe = RatedProbe({BASELINE: BROKEN, FEW: BROKEN})
    assert race(probe, [FEW]) is None
    assert len(probe.asked) <= 2 * MAX_FAILURES


# What runs


def test_a_burst_that_should_have_begun_with_full_queues_is_run_again(monkeypatch):
    # GIVEN SOME that read low until their queues are full, as their first burst shows
    probe = RatedProbe({BASELINE: 50.0, SOME: lambda: 100.0 if probe.plans[-1].prefill_s else 80.0, FEW: 90.0})
    monkeypatch.setattr(burst_source, "prefill_s", lambda config, *_: 0.4 if config == SOME else 0.0)
    outcome = race(probe, [SOME, FEW])
    # THEN all but that burst begin so, and it does not count
    plans = [plan.prefill_s for config, plan in zip(probe.asked, probe.plans, strict=True) if config == SOME]
    assert plans == [0.0, *[0.4] * (len(plans) - 1)]
    assert (outcome.winner, outcome.rate.value) == (SOME, pytest.approx(100.0))
    assert all(plan.prefill_s == 0.0 for config, plan in zip(probe.asked, probe.plans, strict=True) if config != SOME)


def test_everyone_in_a_round_reads_the_same_samples_and_each_round_others():
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0}, noise=0.005)
    race(probe, [FEW])
    seeds = [plan.seed for plan in probe.plans]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == len(seeds) // 2
    assert min(seeds) >= 1000  # the search has read the others
