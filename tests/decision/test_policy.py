"""What to do next, from beliefs alone: no clock, no process, no Optuna."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.decision.belief import FAILURES_TO_STOP_GROWING, Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.policy import MOST_REPEATS, Explore, Goal, Stop, explore
from autotune_loader.decision.space import Space
from autotune_loader.decision.stopping import StopReason
from autotune_loader.testing import FakeClock, SimulatedMachine, SimulatedSource
from autotune_loader.twin import Twin
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure

MACHINE = SimulatedMachine(cores=4, cpu_s=0.02, step_s=0.001, noise_sd=0.02)
FIRST = [LoaderConfig(num_workers=count) for count in (0, 1, 4)]
GOAL = Goal(tolerance=0.02, begin_with=FIRST)


@pytest.fixture
def beliefs() -> Beliefs:
    return Beliefs(Space(max_workers=8), TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.001),)))


def observe(beliefs: Beliefs, *configs: LoaderConfig, phase: str = "search", group: int = 0) -> None:
    source = SimulatedSource(MACHINE, FakeClock())
    for config in configs:
        beliefs.log.add(source.gather(config, Ask(phase=phase, group=group)))


def test_it_begins_with_what_it_is_given_in_order(beliefs: Beliefs) -> None:
    for config in FIRST:
        assert explore(beliefs, GOAL) == Explore(config=config)
        observe(beliefs, config)
    # THEN it is what teaches most, and nothing twice
    todo = explore(beliefs, GOAL)
    assert isinstance(todo, Explore)
    assert todo.config is not None
    assert todo.config not in FIRST


def test_what_others_observe_is_passed_over(beliefs: Beliefs) -> None:
    assert explore(beliefs, replace(GOAL, elsewhere={FIRST[0]})) == Explore(config=FIRST[1])


def test_the_plain_rule_comes_next(beliefs: Beliefs) -> None:
    observe(beliefs, *FIRST)
    rule = explore(beliefs, GOAL)
    assert isinstance(rule, Explore)
    assert rule.config is not None
    assert rule.config == beliefs.plain_rule()
    # AND what teaches most follows
    observe(beliefs, rule.config)
    assert explore(beliefs, GOAL) != rule


def test_without_belief_the_sampler_proposes(beliefs: Beliefs) -> None:
    observe(beliefs, *FIRST)
    assert explore(beliefs, replace(GOAL, by_belief=False)) == Explore(config=None)


@pytest.mark.parametrize(
    ("goal", "reason"),
    [
        (replace(GOAL, has_trials_left=False), StopReason.OUT_OF_TRIALS),
        (replace(GOAL, explore_s=1.0, next_s=2.0), StopReason.OUT_OF_BUDGET),
        (replace(GOAL, may_refine=False), StopReason.OUT_OF_BUDGET),
        (replace(GOAL, repeats=MOST_REPEATS), StopReason.SAMPLER_REPEATS),
        (replace(GOAL, ceiling=1.0), StopReason.CEILING),
        (replace(GOAL, queue=FIRST), StopReason.CHOICE_SAFE),
    ],
)
def test_every_reason_to_stop(beliefs: Beliefs, goal: Goal, reason: StopReason) -> None:
    observe(beliefs, *FIRST)
    assert explore(beliefs, goal) == Stop(reason=reason)
    assert reason.wanted_more == (reason in (StopReason.OUT_OF_TRIALS, StopReason.OUT_OF_BUDGET))


def test_failures_for_want_of_memory_rule_out_more_workers(beliefs: Beliefs) -> None:
    for workers in (4, 6):
        failure = Failure(kind="oom_killed", phase="batches", message="killed")
        beliefs.log.add(Evidence(config=LoaderConfig(num_workers=workers), outcome=failure))
    assert FAILURES_TO_STOP_GROWING == 2
    refused = beliefs.feasible(LoaderConfig(num_workers=6))
    assert refused is not None
    assert "memory" in refused.message
    assert beliefs.feasible(LoaderConfig(num_workers=5)) is None


def test_the_twin_is_fitted_once_for_each_version_of_the_log(beliefs: Beliefs, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, fit = [], Twin.fit
    monkeypatch.setattr(Twin, "fit", lambda *a, **k: (fits.append(1), fit(*a, **k))[1])
    observe(beliefs, *FIRST)
    # WHEN several questions are asked of one version THEN it is fitted once
    beliefs.posterior(), beliefs.twin(), beliefs.predicted(FIRST[1]), explore(beliefs, GOAL)
    assert len(fits) == 1
    # AND once more after more was observed
    observe(beliefs, LoaderConfig(num_workers=2))
    beliefs.posterior(), beliefs.posterior()
    assert len(fits) == 2


def test_a_disturbed_round_says_nothing(beliefs: Beliefs) -> None:
    observe(beliefs, *FIRST)
    before = beliefs.posterior()
    slow = SimulatedSource(replace(MACHINE, cpu_s=0.2), FakeClock())
    beliefs.log.add(slow.gather(FIRST[2], Ask(phase="compare", group=0)))
    assert before is not None
    where = before.configs.index(FIRST[2])
    moved = beliefs.posterior()
    assert moved is not None
    assert moved.mean[where] < before.mean[where] - 0.1
    # WHEN its round is left out THEN it is as if it had not been
    beliefs.log.leave_out([0])
    after = beliefs.posterior()
    assert after is not None
    assert after.mean[where] == before.mean[where]
