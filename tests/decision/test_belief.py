"""What is believed of a job, from what was observed of it: no clock, no process, no Optuna."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.space import Space
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, FailureKind
from autotune_loader.values.statistics import Interval
from tests.support import FakeClock, SimulatedMachine, SimulatedSource

MACHINE = SimulatedMachine(cores=4, cpu_s=0.02, step_s=0.001, noise_sd=0.02)
FIRST = [LoaderConfig(num_workers=count) for count in (0, 1, 4)]


@pytest.fixture
def beliefs() -> Beliefs:
    return Beliefs(Space(max_workers=8), TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.001),)))


def observe(beliefs: Beliefs, *configs: LoaderConfig, phase: str = "search", group: int = 0) -> None:
    source = SimulatedSource(MACHINE, FakeClock())
    for config in configs:
        beliefs.log.add(source.gather(config, Ask(phase=phase, group=group)))


@pytest.mark.parametrize(("capped", "expected"), [(False, 16), (True, 8)])
def test_slow_batches_that_the_first_look_missed_allow_more_workers(capped: bool, expected: int) -> None:
    # GIVEN a space made after a look at quick batches, and storage whose batches take 18 steps in the mean
    space = Space(max_workers=8, workers_are_capped=capped)
    beliefs = Beliefs(space, TwinContext(usable_cores=1, consumer_cores=0.1))
    source = SimulatedSource(SimulatedMachine(cores=1, cpu_s=0.0005, wait_s=0.0715, step_s=0.004), FakeClock())
    # WHEN bursts have shown it
    for workers in (1, 8):
        beliefs.log.add(source.gather(LoaderConfig(num_workers=workers), Ask(phase="search", group=0)))
    # THEN twice as many as were observed may be tried, unless more would be wrong
    assert beliefs.space.max_workers == expected


def test_crowded_workers_are_no_reason_to_allow_more() -> None:
    beliefs = Beliefs(Space(max_workers=4), TwinContext(usable_cores=1, consumer_cores=0.1))
    source = SimulatedSource(SimulatedMachine(cores=1, cpu_s=0.02, step_s=0.01), FakeClock())
    beliefs.log.add(source.gather(LoaderConfig(num_workers=4), Ask(phase="search", group=0)))
    assert beliefs.space.max_workers == 4


def fail(beliefs: Beliefs, workers: int, kind: FailureKind, **config: Any) -> None:
    failure = Failure(kind=kind, phase="batches", message="no")
    beliefs.log.add(Evidence(config=LoaderConfig(num_workers=workers, **config), outcome=failure))


def test_workers_of_the_users_own_that_fail_widen_no_limit(beliefs: Beliefs) -> None:
    observe(beliefs, LoaderConfig(), LoaderConfig(num_workers=1))
    fail(beliefs, 48, "oom_killed")
    assert beliefs.space.max_workers == 8


@pytest.mark.parametrize("config", [{"pin_memory": True}, {"batch_size": 64}])
def test_what_fails_by_another_knob_says_nothing_of_workers(beliefs: Beliefs, config: dict[str, Any]) -> None:
    fail(beliefs, 2, "user_exception", **config)
    assert beliefs.feasible(LoaderConfig(num_workers=4)) is None


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


def test_a_lucky_first_burst_of_what_the_twin_knows_nothing_of_does_not_stay(beliefs: Beliefs) -> None:
    # GIVEN two workers, and the same without the last batch, which was fastest in the first round and slowest in five others
    plain = LoaderConfig(num_workers=2)
    odd = replace(plain, drop_last=True)
    beliefs.space = replace(beliefs.space, drop_lasts=(None, True))
    source = SimulatedSource(MACHINE, FakeClock())
    for number, rate in enumerate([1200.0, 900.0, 900.0, 900.0, 900.0, 900.0]):
        for config, value in ((plain, 1000.0), (odd, rate)):
            seen = source.gather(config, Ask(phase="compare", group=number))
            assert seen.measurement is not None
            interval = Interval(value=value, low=value / 1.03, high=value * 1.03, count=20)
            beliefs.log.add(replace(seen, outcome=replace(seen.measurement, samples_per_s=interval)))
    known = beliefs.posterior()
    assert known is not None
    ratio, sd = known.ratio(known.configs.index(odd), known.configs.index(plain))
    assert ratio < -2 * sd
