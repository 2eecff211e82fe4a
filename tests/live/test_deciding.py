"""When an AutoLoader changes, and to what: on simulated machines, without waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from autotune_loader.decision.space import Space
from autotune_loader.live.blocks import Block, waiting_share
from autotune_loader.live.prospects import Job
from autotune_loader.live.shift import ShiftTest
from autotune_loader.live.spending import CREDIT_S
from autotune_loader.live.traces import Change, LiveTraces, continuous, start_s
from autotune_loader.live.tuner import Event, Tuner
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.trace import BatchTrace
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, SimulatedTraining

ALONE, TWO, TEN = LoaderConfig(), LoaderConfig(num_workers=2), LoaderConfig(num_workers=10)
STORAGE = SimulatedMachine(cores=2, cpu_s=0.003, wait_s=0.093, step_s=0.012, noise_sd=0.02)
COMPUTING = SimulatedMachine(cores=2, cpu_s=0.03, step_s=0.005, noise_sd=0.02)
STEP = SimulatedMachine(cores=2, cpu_s=0.002, step_s=0.06, noise_sd=0.02)
IN_MEMORY = SimulatedMachine(cores=2, cpu_s=0.0012, step_s=0.0024, step_cores=1, receive_s=0.004, noise_sd=0.02)

CROWDED_STEP = SimulatedMachine(cores=2, cpu_s=0.003, step_s=0.008, step_cores=2, receive_s=0.002, noise_sd=0.02)


@dataclass(frozen=True)
class Trained:
    training: SimulatedTraining
    tuner: Tuner
    seconds: float
    samples: int
    told: list[Event]

    @property
    def share(self) -> float:
        """Of the best fixed configuration, over all that was trained."""
        return self.samples / self.seconds / best_rate(self.training.machine)


def train(
    machine: SimulatedMachine,
    seconds: float,
    start: LoaderConfig = TWO,
    *,
    then: SimulatedMachine | None = None,
    seed: int = 0,
    step_threads: tuple[int | None, ...] = (None,),
) -> Trained:
    """Train with a tuner; half-way the machine turns into another one, where there is one."""
    clock, told = FakeClock(), list[Event]()
    training = SimulatedTraining(machine, clock, start, seed=seed)
    job = Job(start=start, usable_cores=machine.cores, step_threads=step_threads)
    tuner = Tuner(
        training,
        job,
        lambda most: Space(max_workers=most, prefetch_factors=(2, 4, 8)),
        clock=clock,
        cpu_clock=lambda: clock() * machine.step_cores,
        on_change=told.append,
    )
    wake, samples = 0.0, 0
    while clock() < seconds:
        if then is not None and clock() > seconds / 2:
            training.machine, then = then, None
        if clock() >= wake:
            wake = tuner.look(clock())
        samples += training.train().samples
    return Trained(training, tuner, clock(), samples, told)


def test_fewer_threads_of_the_step_are_tried_where_that_was_asked_for() -> None:
    # GIVEN a step that gains little from its second core, which workers that compute would use
    machine = SimulatedMachine(
        cores=2, cpu_s=0.03, step_s=0.02, step_cores=2, step_s_by_threads={1: 0.024}, receive_s=0.001, noise_sd=0.02
    )
    # WHEN it trains with and without leave to change them
    asked, left = (train(machine, 30, step_threads=threads).tuner.best for threads in ((None, 1), (None,)))
    # THEN
    assert (asked.consumer_threads, left.consumer_threads) == (1, None)
    assert asked.num_workers > 0


def test_threads_of_a_step_on_one_core_are_left_alone() -> None:
    assert all(
        event.config.consumer_threads is None for event in train(STORAGE, 30, step_threads=(None, 1)).tuner.history
    )


_best: dict[str, float] = {}


def best_rate(machine: SimulatedMachine) -> float:
    if repr(machine) not in _best:
        _best[repr(machine)] = _best_rate(machine)
    return _best[repr(machine)]


def _best_rate(machine: SimulatedMachine) -> float:
    probe = SimulatedProbe(machine, FakeClock())
    configs = [LoaderConfig(num_workers=w, prefetch_factor=p) for w in (1, 2, 3, 4, 6, 8, 10, 12, 16) for p in (2, 4)]
    return max(probe.truth(config, batches=400) for config in [ALONE, *configs])


@pytest.mark.parametrize("machine", [STORAGE, COMPUTING, STEP, IN_MEMORY], ids=["storage", "cpu", "step", "in memory"])
def test_it_finds_what_is_as_fast_as_anything_and_loses_little_meanwhile(machine: SimulatedMachine) -> None:
    trained = train(machine, 40)
    probe = SimulatedProbe(machine, FakeClock())

    assert trained.tuner.is_settled
    assert probe.truth(trained.training.config, batches=400) > 0.97 * best_rate(machine)
    assert trained.share > 0.93


def test_a_loop_of_thousands_of_batches_a_second_is_decided_too() -> None:
    # GIVEN batches of 0.1 ms, of which a block has more than are looked at
    quick = SimulatedMachine(cores=2, cpu_s=0.00006, receive_s=0.0, step_s=0.00003)

    # WHEN it trains for longer than a block may take
    trained = train(quick, 2, start=ALONE)

    # THEN the block has ended
    assert [event.kind for event in trained.tuner.history][:1] == ["block"]


def test_a_step_that_binds_is_left_alone_or_made_cheaper() -> None:
    trained = train(STEP, 30)

    assert {config.num_workers for _, config in trained.training.changes} <= {0, 1}
    assert len(trained.training.changes) <= 2


def test_no_workers_are_tried_where_the_arithmetic_does_not_rule_them_out() -> None:
    assert train(IN_MEMORY, 10).training.config.num_workers == 0
    assert all(config.num_workers for _, config in train(COMPUTING, 30).training.changes)
    # A step that computes runs faster, too, once no worker shares its cores.
    assert train(CROWDED_STEP, 10).training.config.num_workers == 0


def test_after_it_has_settled_an_hour_is_silent() -> None:
    trained = train(replace(STEP, noise_sd=0.05), 3600)
    settled_s = trained.told[0].seconds

    assert sum(when > settled_s + 5 for when, _ in trained.training.changes) <= 2
    assert len(trained.told) <= 3


def test_when_storage_turns_four_times_slower_it_begins_again() -> None:
    slower = replace(STORAGE, wait_s=0.1, step_s=0.02)
    trained = train(replace(STORAGE, wait_s=0.025, step_s=0.02), 120, then=slower)
    probe = SimulatedProbe(slower, FakeClock())
    late = [when for when, _ in trained.training.changes if when > 60]

    assert late
    assert late[0] < 60 + 20
    assert probe.truth(trained.training.config, batches=400) > 0.95 * best_rate(slower)


def test_trying_never_costs_more_than_it_may() -> None:
    trained = train(replace(COMPUTING, noise_sd=0.1), 120, LoaderConfig(num_workers=3, prefetch_factor=4))
    fixed = SimulatedProbe(COMPUTING, FakeClock()).truth(LoaderConfig(num_workers=3, prefetch_factor=4))

    assert trained.samples / fixed > 0.99 * trained.seconds - CREDIT_S


def test_a_configuration_that_fails_is_not_tried_again() -> None:
    def fails(config: LoaderConfig) -> Failure | None:
        return Failure(kind="user_exception", phase="batches", message="no") if config.num_workers > 2 else None

    trained = train(replace(STORAGE, fails=fails), 30)

    failed = [event for event in trained.tuner.history if event.evidence and event.evidence.failure]
    assert failed
    assert len({event.config for event in failed}) == len(failed)
    assert trained.training.config.num_workers == 2


def test_a_job_that_is_only_watched_does_not_change() -> None:
    clock = FakeClock()
    training = SimulatedTraining(STORAGE, clock, TWO)
    tuner = Tuner(training, Job(start=TWO, usable_cores=2, is_fixed=True), lambda most: Space(max_workers=most))
    wake = 0.0
    while clock() < 20:
        wake = tuner.look(clock()) if clock() >= wake else wake
        training.train()

    assert training.changes == []
    assert tuner.history[0].waiting == pytest.approx(1 - 0.25 * 1.0, abs=0.1)


def observed(training: SimulatedTraining, config: LoaderConfig) -> Measurement:
    block = Block(training, config, is_new=config != training.config)
    training.change_to(config)
    while (outcome := block.outcome()) is None:
        training.train()
    assert isinstance(outcome, Measurement)
    return outcome


def test_a_block_begins_with_the_new_pools_first_batch() -> None:
    training = SimulatedTraining(STORAGE, FakeClock(), TWO)
    observed(training, TWO)

    assert observed(training, TEN).samples_per_s.value == pytest.approx(best_rate(STORAGE), rel=0.1)


def test_a_full_queue_does_not_hide_that_too_little_is_made() -> None:
    """GIVEN two workers that make 15.6 batches/s before a step that takes 16.6, from full queues
    THEN the block says what is made."""
    machine = SimulatedMachine(cores=8, cpu_s=0.001, wait_s=0.127, step_s=0.06, service_cv=0.02)
    training = SimulatedTraining(machine, FakeClock(), LoaderConfig(num_workers=8))
    observed(training, LoaderConfig(num_workers=8))
    seen = observed(training, LoaderConfig(num_workers=2, prefetch_factor=4))

    assert seen.samples_per_s.value / 32 < 16.2
    assert waiting_share(seen) > 0.02


def trace(number: float, step_s: float = 0.01) -> BatchTrace:
    return BatchTrace(
        worker=0,
        fetch_start=number,
        fetch_end=number,
        collate_end=number,
        cpu_s=0.0,
        requested=number,
        received=number + 0.001,
        step_end=number + 0.001 + step_s,
        samples=1,
    )


def test_evaluation_and_pauses_are_taken_out_and_starts_are_not() -> None:
    traces = [trace(0.0), trace(0.011), trace(5.0), trace(5.011, step_s=60.0), trace(65.012)]
    start = Change(batch=2, serves_from=2, config=TWO, reason="epoch", begun=4.0, blocked_s=0.1)

    joined = continuous(traces, [start])

    assert joined[-1].step_end - joined[0].requested == pytest.approx(5 * 0.011 + 0.1)
    assert [each.samples for each in joined] == [1] * 5


def test_a_rate_that_shifts_for_good_raises_an_alarm_and_a_short_disturbance_does_not() -> None:
    test = ShiftTest()
    steady = [math.log(100 + (-1) ** number) for number in range(40)]
    assert not any(test.add(each) for each in steady)
    assert not any(test.add(each) for each in (math.log(50), math.log(50), *steady))

    assert [test.add(math.log(80)) for _ in range(6)].index(True) <= 4


def test_what_starting_workers_took_holds_the_wait_until_they_had_imported() -> None:
    log = LiveTraces()
    slow = trace(0.0)._replace(fetch_start=2.5, fetch_end=3.0, collate_end=3.0, received=3.0, step_end=3.01)
    log.note(slow)
    change = Change(batch=0, serves_from=0, config=TWO, reason="start", begun=-0.1, blocked_s=0.1)

    assert start_s(log, change) == pytest.approx(0.1 + 2.5)
    assert start_s(log, replace(change, serves_from=1)) is None


def test_a_loop_without_a_step_asks_for_no_more_workers_than_it_can_receive_from() -> None:
    machine = SimulatedMachine(cores=2, cpu_s=0.0005, wait_s=0.04, step_s=2e-6, receive_s=0.005, noise_sd=0.02)

    assert max(config.num_workers for _, config in train(machine, 10).training.changes) <= 14


def test_where_many_workers_cannot_be_paid_for_fewer_are_tried_first() -> None:
    machine = SimulatedMachine(
        cores=2, cpu_s=0.0005, wait_s=0.04, step_s=2e-6, receive_s=0.0003, worker_start_s=0.04, noise_sd=0.02
    )

    assert train(machine, 10).training.config.num_workers > 20
