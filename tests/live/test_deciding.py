"""When an AutoLoader changes, and to what: on simulated machines, without waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune_loader.decision.space import Space
from autotune_loader.live.prospects import Job
from autotune_loader.live.result import result_of
from autotune_loader.live.spending import CREDIT_S
from autotune_loader.live.traces import Change, continuous
from autotune_loader.live.tuner import Tuner
from autotune_loader.pipeline.site import NOWHERE, Site
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.trace import BatchTrace
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, SimulatedTraining
from tests.support.invariants import contradictions

TWO, THREE = LoaderConfig(num_workers=2), LoaderConfig(num_workers=3, prefetch_factor=4)
STORAGE = SimulatedMachine(cores=2, cpu_s=0.003, wait_s=0.093, step_s=0.012, noise_sd=0.02)
COMPUTING = SimulatedMachine(cores=2, cpu_s=0.03, step_s=0.005, noise_sd=0.02)
STEP = SimulatedMachine(cores=2, cpu_s=0.002, step_s=0.06, noise_sd=0.02)
IN_MEMORY = SimulatedMachine(cores=2, cpu_s=0.0012, step_s=0.0024, step_cores=1, receive_s=0.004, noise_sd=0.02)
CROWDED_STEP = SimulatedMachine(cores=2, cpu_s=0.003, step_s=0.008, step_cores=2, receive_s=0.002, noise_sd=0.02)
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
FIXED = [LoaderConfig(), *(LoaderConfig(num_workers=count, prefetch_factor=p) for count in COUNTS for p in (2, 4))]


class Trained:
    """A training with a tuner; half-way the machine turns into another one, where there is one, or workers are lost."""

    def __init__(
        self,
        machine: SimulatedMachine,
        seconds: float,
        start: LoaderConfig = TWO,
        *,
        then: SimulatedMachine | None = None,
        loses_workers: bool = False,
        **job: Any,
    ) -> None:
        self.told, self.samples, clock, wake = list[Any](), 0, FakeClock(), 0.0
        self.training = SimulatedTraining(machine, clock, start)
        self.tuner = Tuner(
            self.training,
            Job(start=start, usable_cores=machine.cores, **job),
            lambda most: Space(max_workers=most, prefetch_factors=(2, 4, 8)),
            clock=clock,
            cpu_clock=lambda: clock() * machine.step_cores,
            on_change=self.told.append,
        )
        while clock() < seconds:
            if then is not None and clock() > seconds / 2:
                self.training.machine, then = then, None
            if loses_workers and clock() > seconds / 2:
                self.training.lose_workers(start)
                loses_workers = False
            if clock() >= wake:
                wake = self.tuner.look(clock())
            self.samples += self.training.train().samples
        self.seconds = clock()


def rate(machine: SimulatedMachine, *configs: LoaderConfig) -> float:
    """Samples/s of the fastest of some fixed configurations, without noise."""
    probe = SimulatedProbe(machine, FakeClock())
    return max(probe.truth(config, batches=400) for config in configs)


@pytest.mark.parametrize(
    "machine",
    [STORAGE, COMPUTING, STEP, IN_MEMORY, CROWDED_STEP],
    ids=["storage", "cpu", "step", "in memory", "a step on all cores"],
)
def test_it_finds_what_is_as_fast_as_anything_and_loses_little_meanwhile(machine: SimulatedMachine) -> None:
    trained, best = Trained(machine, 40), rate(machine, *FIXED)

    assert trained.tuner.is_settled
    assert rate(machine, trained.training.config) > 0.97 * best
    assert trained.samples / trained.seconds > 0.93 * best
    # AND the table of what was seen calls nothing as fast that is cheaper
    site = Site(line=NOWHERE, dataset="Numbers", samples=None, batch_size=8, is_shuffled=False)
    told = result_of(trained.tuner.beliefs, site=site, asked=TWO, best=trained.tuner.best, seconds=40, said=())
    assert contradictions(told) == []


def test_fewer_threads_of_the_step_are_tried_where_that_was_asked_for() -> None:
    # GIVEN a step that gains little from its second core, which workers that compute would use
    machine = SimulatedMachine(
        cores=2, cpu_s=0.03, step_s=0.02, step_cores=2, step_s_by_threads={1: 0.024}, receive_s=0.001, noise_sd=0.02
    )
    # WHEN it trains with and without leave to change them
    asked, left = (Trained(machine, 30, step_threads=threads).tuner.best for threads in ((None, 1), (None,)))
    # THEN
    assert (asked.consumer_threads, left.consumer_threads) == (1, None)
    assert asked.num_workers > 0
    # AND a step on one core keeps its threads
    on_one_core = Trained(STORAGE, 30, step_threads=(None, 1)).tuner.history
    assert {event.config.consumer_threads for event in on_one_core} == {None}


def test_a_loop_of_thousands_of_batches_a_second_is_decided_too() -> None:
    # Batches of 0.1 ms, of which a block has more than are looked at; it trains for longer than a block may take.
    quick = SimulatedMachine(cores=2, cpu_s=0.00006, receive_s=0.0, step_s=0.00003)

    assert [event.kind for event in Trained(quick, 2, LoaderConfig()).tuner.history][:1] == ["block"]


def test_after_it_has_settled_an_hour_is_silent() -> None:
    trained = Trained(replace(STEP, noise_sd=0.05), 3600)
    settled_s = trained.told[0].seconds

    assert sum(when > settled_s + 5 for when, _ in trained.training.changes) <= 2
    assert len(trained.told) <= 3


def test_when_storage_turns_four_times_slower_it_begins_again() -> None:
    slower = replace(STORAGE, wait_s=0.1, step_s=0.02)
    trained = Trained(replace(STORAGE, wait_s=0.025, step_s=0.02), 120, then=slower)

    assert 60 < next(when for when, _ in trained.training.changes if when > 60) < 60 + 20
    assert rate(slower, trained.training.config) > 0.95 * rate(slower, *FIXED)


def test_trying_never_costs_more_than_it_may() -> None:
    trained = Trained(replace(COMPUTING, noise_sd=0.1), 120, THREE)

    assert trained.samples / rate(COMPUTING, THREE) > 0.99 * trained.seconds - CREDIT_S


def test_a_configuration_that_fails_is_not_tried_again() -> None:
    def fails(config: LoaderConfig) -> Failure | None:
        return Failure(kind="user_exception", phase="batches", message="no") if config.num_workers > 2 else None

    trained = Trained(replace(STORAGE, fails=fails), 30)

    failed = [event.config for event in trained.tuner.history if event.evidence and event.evidence.failure]
    assert 0 < len(failed) == len(set(failed))
    assert trained.training.config.num_workers == 2


def test_blocks_after_lost_workers_are_of_what_runs_in_their_place() -> None:
    quiet, alone = replace(STORAGE, noise_sd=0.0), LoaderConfig()
    trained = Trained(quiet, 80, alone, loses_workers=True)

    blocks = [event.evidence for event in trained.tuner.history if event.kind == "block" and event.config == alone]
    rates = [seen.measurement.samples_per_s.value for seen in blocks if seen and seen.measurement]
    assert trained.training.config == alone
    assert rates == pytest.approx([rate(quiet, alone)] * len(rates), rel=0.05)
    assert len(rates) >= 3


def trace(number: float, step_s: float = 0.01) -> BatchTrace:
    at = dict.fromkeys(("fetch_start", "fetch_end", "collate_end", "requested"), number)
    received = number + 0.001
    return BatchTrace(worker=0, cpu_s=0.0, received=received, step_end=received + step_s, samples=1, **at)


def test_evaluation_and_pauses_are_taken_out_and_starts_are_not() -> None:
    traces = [trace(0.0), trace(0.011), trace(5.0), trace(5.011, step_s=60.0), trace(65.012)]
    start = Change(batch=2, serves_from=2, config=TWO, reason="epoch", begun=4.0, blocked_s=0.1)

    joined = continuous(traces, [start])

    assert joined[-1].step_end - joined[0].requested == pytest.approx(5 * 0.011 + 0.1)
    assert [each.samples for each in joined] == [1] * 5


@pytest.mark.parametrize(
    ("costs", "fewest", "most"),
    [({"receive_s": 0.005}, 1, 14), ({"receive_s": 0.0003, "worker_start_s": 0.04}, 21, 99)],
    ids=["no more workers than can be received from", "fewer are tried first where many cannot be paid for"],
)
def test_a_loop_without_a_step(costs: dict[str, float], fewest: int, most: int) -> None:
    trained = Trained(SimulatedMachine(cores=2, cpu_s=0.0005, wait_s=0.04, step_s=2e-6, noise_sd=0.02, **costs), 10)

    assert trained.training.config.num_workers >= fewest
    assert max(config.num_workers for _, config in trained.training.changes) <= most
