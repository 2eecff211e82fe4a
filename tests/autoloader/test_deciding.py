"""What the tuner decides, on a simulated training: never slower than what was asked for, and as fast as it gets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune_loader.autoloader.tuner import Tuner
from autotune_loader.diagnosis import Kept
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import LoaderConfig
from tests.support.training import Training

NONE = LoaderConfig()


def of(workers: int) -> LoaderConfig:
    return LoaderConfig(num_workers=workers) if workers else NONE


@pytest.mark.parametrize(
    ("asked", "job", "least", "wanted"),
    [
        # a fetch that waits: as many workers as the step needs
        (0, {"fetch_s": 0.04, "cpu": 0.05, "step_s": 0.005}, 0.93, {8, 9, 10}),
        # a fetch that computes: as many as cores
        (0, {"fetch_s": 0.02, "cpu": 1.0, "step_s": 0.002, "cores": 4}, 0.85, {3, 4, 5}),
        # the step limits: two are enough
        (0, {"fetch_s": 0.005, "cpu": 0.5, "step_s": 0.02}, 0.95, {1, 2}),
        # more than were asked for
        (2, {"fetch_s": 0.05, "cpu": 0.05, "step_s": 0.005}, 0.9, {8, 9, 10, 11, 12}),
        # in memory: handing a batch over takes longer than fetching it
        (0, {"fetch_s": 0.0002, "cpu": 1.0, "step_s": 0.0005, "hand_over_s": 0.001}, 0.99, {0}),
        # the loop does not wait
        (0, {"fetch_s": 0.001, "cpu": 1.0, "step_s": 0.1}, 0.99, {0}),
        (2, {"fetch_s": 0.05, "cpu": 0.1, "step_s": 0.1}, 0.99, {2}),
        # short epochs, whose starts and ends count
        (0, {"fetch_s": 0.02, "cpu": 0.05, "step_s": 0.002, "epoch_batches": 12}, 0.9, {9, 10, 11, 12}),
        (0, {"fetch_s": 0.004, "cpu": 0.5, "step_s": 0.0005, "epoch_batches": 20, "cores": 2}, 0.95, {3, 4, 5}),
        # of one to three batches: no worker is started
        (0, {"fetch_s": 0.1, "cpu": 0.1, "step_s": 0.0001, "epoch_batches": 3}, 0.99, {0}),
    ],
)
def test_what_is_settled_on_and_how_fast_it_is(asked: int, job: dict[str, Any], least: float, wanted: set[int]) -> None:
    training = Training(**job)
    tuner = training.tuner(of(asked))
    training.run(tuner, 60.0)
    rate = training.run(tuner, 30.0)
    assert tuner.best.num_workers in wanted
    assert training.started == 0 or job.get("epoch_batches") != 3
    assert rate >= least * max(training.rate(of(workers)) for workers in (0, asked, *wanted))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("asked", [0, 2])
@pytest.mark.parametrize("seconds", [5.0, 20.0])
def test_no_job_is_slower_than_asked_by_over_2_percent_and_half_a_second(seed: int, asked: int, seconds: float) -> None:
    training = Training.drawn(seed)
    tuner = training.tuner(of(asked))
    plain = training.rate(of(asked)) * seconds
    took = training.until(tuner, plain)
    assert took <= 1.02 * seconds + 0.5


def test_who_is_slower_is_known_before_whole_epochs_are_compared() -> None:
    training = Training(fetch_s=0.0005, cpu=1.0, step_s=0.0003, hand_over_s=0.001, epoch_batches=1000, noise=0.0)
    tuner = training.tuner(NONE)
    assert training.until(tuner, 8.0 * training.rate(NONE)) <= 1.02 * 8.0 + 0.25
    assert training.started > 0


def test_queues_that_fill_up_while_the_loop_compares_are_no_speed() -> None:
    log, now = Log(), 100.0
    tuner = Tuner(log, of(2), cores=2)
    loop = log.begin(now)
    loop.started(now)
    for number in range(40):  # each of two workers takes 1 s; the loop has fetched number 8 itself, for 10 s
        ready = now if 8 < number <= 16 else now + 0.5
        begun, worker = (now, -1) if number == 8 else (ready - 1.0, number % 2)
        end = now + 10.0 if number == 8 else ready
        loop.ask(now)
        loop.receive(now := end, 8, (worker, begun, end, end, 0.1))
    loop.ask(now)
    tuner.applied(0.0)
    tuner.look(now)
    assert tuner.measured[of(2)][0].samples_per_s.value == pytest.approx(16, rel=0.01)


def test_no_more_workers_than_are_allowed() -> None:
    training = Training(fetch_s=0.04, cpu=0.05, step_s=0.002)
    tuner = training.tuner(NONE, max_workers=3)
    training.run(tuner, 60.0)
    assert training.most == tuner.best.num_workers == 3


def test_a_rate_that_shifts_later_is_answered() -> None:
    training = Training(fetch_s=0.01, cpu=0.05, step_s=0.01)
    tuner = training.tuner(NONE)
    training.run(tuner, 60.0)
    before = tuner.best.num_workers
    training.fetch_s *= 6  # another folder, on a slower disk
    training.run(tuner, 360.0)
    assert tuner.best.num_workers > before
    assert training.run(tuner, 30.0) > 0.9 * training.rate(of(12))


def test_who_was_refused_or_frozen_goes_back_to_or_stays_with_what_runs() -> None:
    training = Training(fetch_s=0.04, cpu=0.05, step_s=0.005)
    tuner = training.tuner(of(1))
    training.run(tuner, 30.0)
    assert tuner.gain is not None
    best = tuner.best
    assert best in tuner.rounds[-1].rates
    tuner.freeze()
    training.run(tuner, 400.0)
    assert tuner.wanted == best
    tuner.refuse(Kept.FROZEN())
    assert (tuner.wanted, tuner.best, tuner.gain) == (of(1), of(1), None)


def test_trials_may_cost_half_a_second_and_a_hundredth_and_half_of_the_gain() -> None:
    log = Log()
    tuner = Tuner(log, NONE, cores=2)
    tuner.own_s = 0.4
    assert tuner.may(0.05)
    assert not tuner.may(0.2)
    log.totals.stepped_s = 20.0
    assert tuner.may(0.2)
    log.totals.stepped_s, tuner.gained_s = 0.0, 10.0
    assert tuner.may(4.0)


def test_looking_costs_the_same_after_ten_thousand_epochs() -> None:
    log = Log()
    tuner = Tuner(log, NONE, cores=2)
    now = 0.0
    for _ in range(10_000):
        loop = log.begin(now)
        loop.started(now)
        loop.ask(now)
        loop.receive(now + 1e-4, 8, (-1, now, now, now + 1e-4, 1e-4))
        loop.ask(now := now + 0.1)
        if now >= tuner.wake:
            tuner.look(now)
        loop.end(now)
    assert len(log.rows) <= 40_000
    assert tuner.wanted == NONE
    assert math.isfinite(tuner.wake)
