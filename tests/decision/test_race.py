"""Paired rounds: no claim without difference, the cheapest of equals, time kept, and failures survived."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from autotune_loader.decision.posterior import Posterior, Seen
from autotune_loader.decision.race import (
    MAX_FAILURES,
    MIN_ROUNDS,
    PATIENT_ROUNDS,
    Race,
    RaceRules,
)
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


class RatedProbe:
    """Answers with given rates and noise; a burst takes a second of the clock."""

    def __init__(self, rates, *, noise=0.0, seed=0, foreign=None):
        self.rates, self.noise, self.foreign = rates, noise, foreign
        self.clock, self.rng = FakeClock(), random.Random(seed)
        self.asked, self.plans = [], []
        self._shape = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(FEW, BurstPlan(max_s=0.3, min_s=0.1))

    def burst(self, config, plan):
        self.asked.append(config)
        self.plans.append(plan)
        self.clock.advance(BURST_S)
        rate = self.rates[config]
        rate = rate(len(self.asked)) if callable(rate) else rate
        if isinstance(rate, Failure):
            return rate
        rate *= 1 + self.rng.gauss(0, self.noise)
        interval = Interval(value=rate, low=rate * 0.98, high=rate * 1.02, count=20)
        return replace(self._shape, samples_per_s=interval, foreign_cpu_share=self.foreign)


def learnt(prior, running):
    """What is believed after the rounds."""
    seen = [
        (prior.configs.index(config), np.log(rate), number)
        for number, each in enumerate(running.usable())
        for config, rate in each.rates.items()
    ]
    if not seen:
        return prior
    where, logs, numbers = map(np.array, zip(*seen, strict=True))
    return prior.after(Seen(where=where, logs=logs, variances=np.full(len(seen), 0.01**2), rounds=numbers))


def race(
    probe,
    candidates,
    baseline=BASELINE,
    *,
    budget_s=1000.0,
    seed=0,
    prior=None,
    nominate=list,
    **rules,
):
    """The outcome of rounds between these, by the rounds alone or with what was believed before."""
    rules = {"tolerance": 0.02, "patience_s": 1000.0, "cost": lambda config: (config.num_workers,), **rules}
    running = Race(candidates, baseline, RaceRules(**rules), lambda: prior and learnt(prior, running))

    def seconds_left():
        return budget_s - probe.clock()

    def learn(gathered):
        if running.is_admitting():
            running.admit(nominate())

    context = TwinContext(usable_cores=64, consumer_cores=1.0)
    source = BurstSource(probe, Space(max_workers=8), context, [], seconds_left)
    return run_rounds(running, source, seconds_left=seconds_left, seed=seed, learn=learn, on_round=lambda *_: None)


def known(configs, rates, sd):
    """A search that believes in these rates, so surely."""
    return Posterior(configs=tuple(configs), mean=np.log(rates), covariance=sd**2 * np.eye(len(rates)), noise_sd=0.03)


def recorded(rounds, prior=None):
    """A race between SOME and MANY after rounds with these rates by configuration."""
    rules = RaceRules(tolerance=0.02, cost=lambda config: (config.num_workers,), patience_s=1000.0)
    opened = Race([SOME, MANY], BASELINE, rules, lambda: prior and learnt(prior, opened))
    shape = RatedProbe({})._shape
    for rates in rounds:
        measured = [(c, replace(shape, samples_per_s=replace(shape.samples_per_s, value=r))) for c, r in rates.items()]
        opened.record(measured, seconds=3.0)
    return opened


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


def test_a_true_speed_up_lies_in_its_interval_and_a_clear_answer_takes_few_rounds():
    outcome = race(RatedProbe({BASELINE: 50.0, FEW: 100.0}, noise=0.005), [FEW])
    assert 1 < outcome.speedup.low < 2.0 < outcome.speedup.high
    assert outcome.rate.low < 100 < outcome.rate.high
    assert len(outcome.rounds) == MIN_ROUNDS


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


def test_more_workers_must_be_faster_in_the_rounds_themselves_to_be_chosen():
    # GIVEN a search that holds SOME for 10 % faster than FEW WHEN fewer are as fast in every round
    prior = known((FEW, SOME, BASELINE), [100.0, 110.0, 50.0], sd=0.06)
    assert race(RatedProbe({BASELINE: 50.0, FEW: 100.0, SOME: 100.0}), [SOME, FEW], prior=prior).winner == FEW


@pytest.mark.parametrize("prior", [None, known((SOME, MANY, BASELINE), [900.0] * 3, sd=0.3)], ids=["rounds", "belief"])
@pytest.mark.parametrize(("faster", "other"), [(SOME, MANY), (MANY, SOME)])
def test_who_went_on_when_the_machine_grew_slow_still_wins_by_the_rounds_that_both_ran_in(faster, other, prior):
    # GIVEN two rounds in which one was 5 % faster, and three without the other in which everything was 20 % slower
    rounds = [{faster: 1000.0, other: 950.0, BASELINE: 500.0}] * 2 + [{faster: 800.0, BASELINE: 400.0}] * 3
    assert recorded(rounds, prior).outcome().winner == faster


def test_the_baseline_does_not_win_by_the_disturbed_rounds_of_the_favourite():
    # GIVEN a belief in SOME, whose bursts were disturbed in two of three rounds, so that the baseline was faster there
    prior = known((SOME, MANY, BASELINE), [340.0, 330.0, 250.0], sd=0.06)
    rates = [(336.0, 343.0, 228.0), (216.0, 309.0, 238.0), (237.0, 296.0, 253.0)]
    opened = recorded([dict(zip((SOME, MANY, BASELINE), each, strict=True)) for each in rates], prior)
    # THEN the winner is not the baseline, which MANY beat by a fifth in every round
    assert opened.outcome().winner in (SOME, MANY)


def test_a_belief_stands_against_scattered_rounds_but_not_against_all_of_them():
    prior = known((MANY, SOME, BASELINE), [99.0, 103.0, 50.0], sd=0.03)
    always, sometimes = itertools.repeat(120.0), itertools.cycle([120.0, 90.0, 90.0])
    for rates, winner in ((always, MANY), (sometimes, SOME)):
        probe = RatedProbe({BASELINE: 50.0, MANY: lambda _, rates=rates: next(rates), SOME: 100.0}, noise=0.01)
        assert race(probe, [SOME, MANY], prior=prior).winner == winner


@pytest.mark.parametrize("is_late", [False, True])
def test_who_the_rounds_make_a_candidate_is_let_in_but_does_not_win_by_one_burst(is_late):
    # GIVEN a configuration that the search did not send to the finals, and that becomes a candidate at once or for one round
    probe = RatedProbe({BASELINE: 50.0, FEW: 80.0, SOME: 100.0}, noise=0.01)
    prior = known((FEW, SOME, BASELINE), [80.0, 100.0, 50.0], sd=0.03)

    def nominate():
        return [SOME] if probe.asked.count(FEW) == (2 if is_late else 1) else []

    limits = {"patience_s": 6.0, "budget_s": 8.5} if is_late else {}
    outcome = race(probe, [FEW], prior=prior, nominate=nominate, **limits)
    assert (probe.asked.count(SOME) == 1) is is_late
    assert outcome.winner == (FEW if is_late else SOME)
    assert outcome.speedup.count >= 2


# How long it takes


def test_a_single_round_claims_nothing_and_no_time_is_no_outcome():
    rates = {BASELINE: 50.0, FEW: 100.0}
    outcome = race(RatedProbe(rates), [FEW], budget_s=2.5)
    assert (len(outcome.rounds), outcome.speedup) == (1, None)
    assert outcome.rate.low <= 100 <= outcome.rate.high
    assert race(RatedProbe(rates), [FEW], budget_s=-1.0) is None


@pytest.mark.parametrize("budget_s", [3, 7, 20, 45])
def test_no_round_begins_that_would_not_fit(budget_s):
    # GIVEN rounds of three seconds that leave the question open
    probe = RatedProbe({BASELINE: 100.0, FEW: 100.0, SOME: 100.0}, noise=0.05)
    race(probe, [FEW, SOME], budget_s=budget_s)
    assert probe.clock() <= budget_s


@pytest.mark.parametrize(
    ("rates", "noise"),
    [({BASELINE: 100.0, FEW: 100.0, SOME: 100.0}, 0.05), ({BASELINE: BROKEN, FEW: 80.0, SOME: 81.0}, 0.01)],
)
def test_patience_ends_open_questions_but_not_before_the_first_rounds(rates, noise):
    assert len(race(RatedProbe(rates, noise=noise), [FEW, SOME], patience_s=0.0).rounds) == PATIENT_ROUNDS


def test_there_is_an_end_without_any_limit(monkeypatch):
    monkeypatch.setattr("autotune_loader.decision.race.MAX_ROUNDS", 20)
    probe = RatedProbe({BASELINE: 100.0, FEW: 100.0, SOME: 100.0}, noise=0.2)
    assert len(race(probe, [FEW, SOME], budget_s=1e9, patience_s=1e9).rounds) == 20


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


def test_a_finalist_that_keeps_failing_is_dropped_and_named():
    probe = RatedProbe({BASELINE: 50.0, FEW: 90.0, SOME: BROKEN}, noise=0.01)
    outcome = race(probe, [SOME, FEW])
    assert probe.asked.count(SOME) == MAX_FAILURES
    assert outcome.winner == FEW
    assert any(str(SOME) in note and "finals" in note for note in outcome.notes)


def test_one_failure_is_forgiven():
    failed = []
    probe = RatedProbe({BASELINE: 50.0, SOME: lambda count: 100.0 if failed else (failed.append(1), BROKEN)[1]})
    assert race(probe, [SOME]).winner == SOME


def test_a_baseline_that_fails_leaves_the_speed_up_unknown_and_where_all_fail_there_is_no_outcome():
    outcome = race(RatedProbe({BASELINE: BROKEN, FEW: 100.0, SOME: 90.0}, noise=0.01), [FEW, SOME])
    assert (outcome.winner, outcome.speedup) == (FEW, None)
    probe = RatedProbe({BASELINE: BROKEN, FEW: BROKEN})
    assert race(probe, [FEW]) is None
    assert len(probe.asked) <= 2 * MAX_FAILURES


# What runs


def test_a_burst_that_should_have_begun_with_full_queues_is_run_again(monkeypatch):
    # GIVEN SOME that read low until their queues are full, as their first burst shows
    def rate(asked):
        return 100.0 if probe.plans[-1].prefill_s else 80.0

    probe = RatedProbe({BASELINE: 50.0, SOME: rate, FEW: 90.0})
    monkeypatch.setattr(burst_source, "prefill_s", lambda config, *_: 0.4 if config == SOME else 0.0)
    outcome = race(probe, [SOME, FEW])
    # THEN all but that burst begin so, and it does not count
    plans = [plan.prefill_s for config, plan in zip(probe.asked, probe.plans, strict=True) if config == SOME]
    assert plans == [0.0, *[0.4] * (len(plans) - 1)]
    assert outcome.winner == SOME
    assert outcome.rate.value == pytest.approx(100.0)
    assert all(plan.prefill_s == 0.0 for config, plan in zip(probe.asked, probe.plans, strict=True) if config != SOME)


def test_everyone_in_a_round_reads_the_same_samples_and_each_round_others():
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0}, noise=0.005)
    race(probe, [FEW])
    seeds = [plan.seed for plan in probe.plans]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == len(seeds) // 2
    assert min(seeds) >= 1000  # the search has read the others
