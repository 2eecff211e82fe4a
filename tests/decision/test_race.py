"""Paired rounds: no claim without difference, the cheapest of equals, time kept, and failures survived."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.posterior import Posterior, Seen
from autotune_loader.decision.race import MAX_FAILURES, MIN_ROUNDS, PATIENT_ROUNDS, Race, RaceOutcome, RaceRules
from autotune_loader.decision.space import Space
from autotune_loader.tuning import burst_source
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.finals import run_rounds
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import MAX_ROUNDS, Interval
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

BASELINE = LoaderConfig()
FEW, SOME, MANY = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
ALL = (BASELINE, FEW, SOME, MANY)
BROKEN = Failure(kind="crashed", phase="batches", message="no")
BURST_S = 1.0
SHAPE = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(FEW, BurstPlan(max_s=0.3, min_s=0.1))
assert isinstance(SHAPE, Measurement)


class RatedProbe:
    """Answers with given rates and noise; a burst takes a second of the clock."""

    def __init__(
        self, rates: dict[LoaderConfig, Any], *, noise: float = 0.0, seed: int = 0, foreign: float | None = None
    ) -> None:
        self.rates, self.noise, self.foreign = rates, noise, foreign
        self.clock, self.rng = FakeClock(), random.Random(seed)
        self.asked: list[LoaderConfig] = []
        self.plans: list[BurstPlan] = []

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.asked.append(config)
        self.plans.append(plan)
        self.clock.advance(BURST_S)
        rate = self.rates[config]
        rate = rate() if callable(rate) else rate
        if isinstance(rate, Failure):
            return rate
        rate *= 1 + self.rng.gauss(0, self.noise)
        interval = Interval(value=rate, low=rate * 0.99, high=rate * 1.01, count=20)
        return replace(SHAPE, samples_per_s=interval, foreign_cpu_share=self.foreign)


class Belief:
    """What rounds and a prior of any width say."""

    def __init__(self, prior: dict[LoaderConfig, float], sd: float) -> None:
        self.prior = Posterior(
            configs=tuple(prior), mean=np.log(list(prior.values())), covariance=sd**2 * np.eye(len(prior))
        )
        self.evidence: list[Evidence] = []

    def __call__(self) -> Posterior:
        rated = [each for each in self.evidence if each.measurement is not None]
        return self.prior.after(
            Seen(
                where=np.array([self.prior.configs.index(each.key) for each in rated], dtype=np.int64),
                logs=np.array([each.log_rate for each in rated]),
                variances=np.array([each.own_sd**2 for each in rated]),
                rounds=np.array([each.group for each in rated], dtype=np.int64),
            )
        )


def race(
    probe: RatedProbe,
    candidates: Sequence[LoaderConfig],
    *,
    budget_s: float = 1000.0,
    seed: int = 0,
    belief: Belief | None = None,
    nominate: Callable[[], list[LoaderConfig]] = list,
    on_round: Callable[..., None] = lambda *_: None,
    **rules: Any,
) -> RaceOutcome | None:
    """The outcome of rounds between these and the baseline; by default nothing is believed but what they show."""
    known = belief or Belief(dict.fromkeys(ALL, 90.0), sd=0.7)
    rules = {"tolerance": 0.02, "patience_s": 1000.0, "cost": lambda config: (config.num_workers,), **rules}
    running = Race(candidates, BASELINE, RaceRules(**rules), known)

    def seconds_left() -> float:
        return budget_s - probe.clock()

    def learn(gathered: Sequence[Evidence]) -> None:
        known.evidence += gathered
        if running.is_admitting():
            running.admit(nominate())

    source = BurstSource(
        probe, Space(max_workers=8), TwinContext(usable_cores=64, consumer_cores=1.0), [], seconds_left
    )
    return run_rounds(running, source, seconds_left=seconds_left, seed=seed, learn=learn, on_round=on_round)


def done(outcome: RaceOutcome | None) -> RaceOutcome:
    assert outcome is not None
    return outcome


@pytest.mark.acceptance
def test_equal_configs_hardly_ever_claim_a_speed_up() -> None:
    # GIVEN three configurations that are all as fast as the baseline, and the noise of real bursts
    claims = 0
    for seed in range(60):
        probe = RatedProbe(dict.fromkeys(ALL, 100.0), noise=0.03, seed=seed)
        # WHEN they race
        outcome = done(race(probe, [MANY, SOME, FEW], patience_s=30.0, seed=seed))
        # THEN a speed-up is claimed in no more cases than its interval allows (5 % two-sided)
        claims += outcome.speedup is not None and outcome.speedup.low > 1
    assert claims <= 5


@pytest.mark.parametrize(
    ("rates", "winner"),
    [
        ({BASELINE: 50.0, FEW: 99.9, SOME: 100.0, MANY: 100.1}, FEW),  # equally fast: the cheapest
        ({BASELINE: 50.0, FEW: 95.0, SOME: 100.0}, SOME),  # cheaper, but slower than the tolerance
        ({BASELINE: 100.0, FEW: 100.1}, BASELINE),
        ({BASELINE: 50.0, FEW: 100.0, SOME: 110.0}, SOME),
        ({BASELINE: 50.0, FEW: 90.0, SOME: BROKEN}, FEW),
        ({BASELINE: BROKEN, FEW: 100.0, SOME: 90.0}, FEW),
    ],
)
def test_who_wins(rates: dict[LoaderConfig, Any], winner: LoaderConfig) -> None:
    outcome = done(race(RatedProbe(rates, noise=0.004), [c for c in (MANY, SOME, FEW) if c in rates]))
    assert outcome.winner == winner
    assert (outcome.speedup is None) == (rates[BASELINE] is BROKEN)
    # AND the winner itself is told as exactly as fast as itself
    if winner == BASELINE:
        assert outcome.speedup is not None
        assert (outcome.speedup.low, outcome.speedup.value, outcome.speedup.high) == (1.0, 1.0, 1.0)


def test_a_true_speed_up_is_found_and_lies_in_its_interval() -> None:
    outcome = done(race(RatedProbe({BASELINE: 50.0, FEW: 100.0}, noise=0.02), [FEW]))
    assert outcome.speedup is not None
    assert 1 < outcome.speedup.low < 2.0 < outcome.speedup.high
    assert outcome.rate.low < 100 < outcome.rate.high


def test_a_belief_weighs_as_much_as_it_is_sure_and_rounds_can_overrule_it() -> None:
    # GIVEN a belief that SOME are 10 % faster than FEW
    rates = {BASELINE: 50.0, FEW: 90.0, SOME: 99.0}

    def winner(sd: float, few: float) -> LoaderConfig:
        probe = RatedProbe({BASELINE: 50.0, FEW: few, SOME: 99.0}, noise=0.01)
        return done(race(probe, [SOME, FEW], belief=Belief(rates, sd), patience_s=12.0)).winner

    # WHEN rounds say that FEW are as fast THEN they win, unless it is surer than rounds can be
    assert winner(sd=0.05, few=99.0) == FEW
    assert winner(sd=0.0005, few=90.0) == SOME


def test_as_fast_as_the_step_alone_is_said_and_a_faster_one_denies_it() -> None:
    rates = {BASELINE: 990.0, MANY: 1001.0}
    at_ceiling: dict[str, Any] = {"ceiling": lambda config: 1000.0}
    assert done(race(RatedProbe(rates), [MANY], budget_s=6.5, **at_ceiling)).at_ceiling
    assert not done(race(RatedProbe({**rates, MANY: 1300.0}), [MANY], **at_ceiling)).at_ceiling
    assert not done(race(RatedProbe(rates), [MANY], budget_s=2.5, **at_ceiling)).at_ceiling  # in one round


def test_a_single_round_claims_nothing() -> None:
    outcome = done(race(RatedProbe({BASELINE: 50.0, FEW: 100.0}), [FEW], budget_s=2.5))
    assert (len(outcome.rounds), outcome.speedup) == (1, None)
    assert outcome.rate.low <= 100 <= outcome.rate.high


def test_no_time_at_all_is_no_outcome() -> None:
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0})
    assert race(probe, [FEW], budget_s=-1.0) is None
    assert probe.asked == []


@pytest.mark.parametrize("budget_s", [3, 7, 20, 45])
def test_no_round_begins_that_would_not_fit(budget_s: float) -> None:
    probe = RatedProbe(dict.fromkeys((BASELINE, FEW, SOME), 100.0), noise=0.05)
    race(probe, [FEW, SOME], budget_s=budget_s)
    assert probe.clock() <= budget_s


def test_patience_ends_open_questions_but_not_before_the_first_rounds() -> None:
    probe = RatedProbe({BASELINE: 98.0, FEW: 99.0, SOME: 101.0}, noise=0.05)
    assert len(done(race(probe, [FEW, SOME], patience_s=0.0)).rounds) == PATIENT_ROUNDS


def test_there_is_an_end_without_any_limit() -> None:
    probe = RatedProbe(dict.fromkeys((BASELINE, FEW, SOME), 100.0), noise=0.2)
    assert len(done(race(probe, [FEW, SOME], budget_s=1e9, patience_s=1e9)).rounds) <= MAX_ROUNDS


@pytest.mark.parametrize("slow", [BASELINE, FEW])
def test_who_is_clearly_slower_sits_out(slow: LoaderConfig) -> None:
    probe = RatedProbe({BASELINE: 97.5, FEW: 97.0, SOME: 100.0, slow: 50.0}, noise=0.01)
    outcome = done(race(probe, [SOME, FEW], patience_s=20.0))
    assert probe.asked.count(slow) < len(outcome.rounds)


def test_a_clear_answer_takes_few_rounds() -> None:
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0}, noise=0.005)
    assert len(done(race(probe, [FEW])).rounds) == MIN_ROUNDS


def test_a_finalist_that_keeps_failing_is_dropped_and_named() -> None:
    probe = RatedProbe({BASELINE: 50.0, FEW: 90.0, SOME: BROKEN}, noise=0.01)
    outcome = done(race(probe, [SOME, FEW]))
    assert probe.asked.count(SOME) == MAX_FAILURES
    assert any(str(SOME) in note and "finals" in note for note in outcome.notes)


def test_a_finalist_that_would_hang_again_is_out_at_once() -> None:
    probe = RatedProbe({BASELINE: 50.0, FEW: 90.0, SOME: replace(BROKEN, kind="deadline")}, noise=0.01)
    race(probe, [SOME, FEW])
    assert probe.asked.count(SOME) == 1


def test_one_failure_is_forgiven() -> None:
    rates = iter([BROKEN])
    probe = RatedProbe({BASELINE: 50.0, SOME: lambda: next(rates, 100.0)})
    assert done(race(probe, [SOME])).winner == SOME


def test_where_all_fail_there_is_no_outcome() -> None:
    probe = RatedProbe({BASELINE: BROKEN, FEW: BROKEN})
    assert race(probe, [FEW]) is None
    assert len(probe.asked) <= 2 * MAX_FAILURES


def test_who_the_rounds_make_a_candidate_is_let_in() -> None:
    # GIVEN a configuration that the search did not send to the finals WHEN what is known nominates it THEN it runs
    probe = RatedProbe({BASELINE: 50.0, FEW: 80.0, SOME: 100.0}, noise=0.01)
    outcome = done(race(probe, [FEW], nominate=lambda: [SOME]))
    assert outcome.winner == SOME
    assert probe.asked.count(SOME) >= 2


def test_who_ran_only_once_does_not_win() -> None:
    # GIVEN a configuration that becomes a candidate when there is time for one more round
    probe = RatedProbe({BASELINE: 50.0, FEW: 80.0, SOME: 100.0}, noise=0.01)
    outcome = done(race(probe, [FEW], budget_s=8.5, nominate=lambda: [SOME] if probe.asked.count(FEW) == 2 else []))
    # THEN it is not chosen: one burst has no interval
    assert probe.asked.count(SOME) == 1
    assert outcome.winner == FEW


def test_a_burst_that_should_have_begun_with_full_queues_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN SOME that read low until their queues are full, as their first burst shows
    probe = RatedProbe({BASELINE: 50.0, SOME: lambda: 100.0 if probe.plans[-1].prefill_s else 80.0, FEW: 90.0})
    monkeypatch.setattr(burst_source, "prefill_s", lambda config, *_: 0.4 if config == SOME else 0.0)
    # WHEN they race
    outcome = done(race(probe, [SOME, FEW]))
    # THEN all but that burst begin so, and it does not count
    plans = {config: [] for config in ALL}
    for config, plan in zip(probe.asked, probe.plans, strict=True):
        plans[config].append(plan.prefill_s)
    assert plans[SOME] == [0.0] + [0.4] * (len(plans[SOME]) - 1)
    assert (outcome.winner, outcome.rate.value) == (SOME, pytest.approx(100.0))
    assert not any(plans[FEW] + plans[BASELINE])


def test_everyone_in_a_round_reads_the_same_samples_and_each_round_others() -> None:
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0}, noise=0.005)
    race(probe, [FEW])
    seeds = [plan.seed for plan in probe.plans]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == len(seeds) // 2
    assert min(seeds) >= 1000


def test_the_order_within_rounds_varies_and_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[LoaderConfig]:
        probe = RatedProbe(dict.fromkeys((BASELINE, FEW, SOME), 100.0), noise=0.02)
        race(probe, [FEW, SOME], patience_s=30.0, seed=seed)
        return probe.asked

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_each_round_is_told() -> None:
    told: list[tuple[int, dict[LoaderConfig, float]]] = []
    probe = RatedProbe({BASELINE: 50.0, FEW: 100.0})
    outcome = done(race(probe, [FEW], on_round=lambda number, rates, _: told.append((number, rates))))
    assert [number for number, _ in told] == [*range(1, len(outcome.rounds) + 1)]
    assert told[0][1] == {FEW: 100.0, BASELINE: 50.0}


def test_a_busy_machine_is_noted() -> None:
    assert "busy" in done(race(RatedProbe({BASELINE: 50.0, FEW: 100.0}, foreign=0.9), [FEW])).notes[0]


def test_the_next_round_is_expected_to_take_as_long_as_its_own_entrants() -> None:
    # GIVEN a first round of five, of which two need another one
    crowd = [LoaderConfig(num_workers=count) for count in (3, 5, 6)]
    probe = RatedProbe({BASELINE: 50.0, SOME: 100.0} | dict.fromkeys(crowd, 60.0))
    belief = Belief(dict.fromkeys((BASELINE, SOME, *crowd), 80.0), sd=0.7)
    # WHEN after it there is time for a round of these, and not for one of all THEN they run again
    outcome = done(race(probe, [SOME, *crowd], budget_s=7.5, belief=belief))
    assert len(outcome.rounds) == 2
    assert outcome.speedup is not None
