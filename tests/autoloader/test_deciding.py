"""What the tuner decides, on a simulated training that drives the real loader and iterator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autotune_loader.autoloader.meter import Measure, Meter, Reached, measured
from autotune_loader.autoloader.tuner import EpochEnded, Failed, Frozen, Refused, Tuner
from autotune_loader.diagnosis import Kept
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import LoaderConfig
from tests.support import with_workers
from tests.support.training import BEGUN_S, WORKER_BYTES, Training, together

NONE = LoaderConfig()


def job(fetch_s: float, cpu: float, step_s: float, **more: Any) -> dict[str, Any]:
    return {"fetch_s": fetch_s, "cpu": cpu, "step_s": step_s, **more}


WAITS = job(0.05, 0.05, 0.005)
"""Ten workers are as fast as the step."""
IN_MEMORY = job(0.0002, 1.0, 0.0005, transfer_s=0.001)
"""Handing a batch over takes longer than fetching it."""


@pytest.mark.parametrize(
    ("asked", "job", "least", "wanted", "kept"),
    [
        # A fetch that waits gets as many workers as the step needs; one that computes, as cores.
        (0, job(0.04, 0.05, 0.005), 0.93, {8, 9, 10}, None),
        (0, job(0.02, 1.0, 0.002), 0.85, {3, 4, 5}, None),
        (0, job(0.005, 0.5, 0.02), 0.95, {1, 2}, None),
        (2, WAITS, 0.9, {8, 9, 10, 11, 12}, None),
        # Workers bring nothing, which is known at once, or tried.
        (0, IN_MEMORY, 0.99, {0}, "too_short"),
        (0, job(0.002, 1.0, 0.0005, transfer_s=0.003), 0.97, {0}, "not_faster"),
        # The loop does not wait.
        (0, job(0.001, 1.0, 0.1), 0.99, {0}, "not_waiting"),
        (2, job(0.05, 0.1, 0.1), 0.99, {2}, "not_waiting"),
        # Starts and ends of short epochs count; of one to three batches no worker is started.
        (0, job(0.02, 0.05, 0.002, epoch_batches=12), 0.9, {4, 5, 6}, None),
        (0, job(0.1, 0.1, 0.0001, epoch_batches=3), 0.99, {0}, "too_short"),
    ],
)  # fmt: skip
def test_settles_on_the_fastest_and_says_why(
    asked: int, job: dict[str, Any], least: float, wanted: set[int], kept: str | None
) -> None:
    training = Training(**job)
    tuner = training.tuner(with_workers(asked))
    training.run(45.0)
    rate = training.run(15.0)
    assert tuner.best.num_workers in wanted
    assert (training.loader.kept and training.loader.kept.kind) == kept
    assert (training.started > asked) == (kept not in ("too_short", "not_waiting"))
    assert rate >= least * max(
        training.rate(with_workers(each), 10.0) for each in {0, asked, max(wanted)}
    )


@pytest.mark.parametrize(("seed", "asked"), [*itertools.product(range(8), [0, 2])])
def test_never_slower_by_2_percent_and_half_second(seed: int, asked: int) -> None:
    tuned = Training.drawn(seed)
    tuned.tuner(with_workers(asked))
    plain = tuned.fixed(with_workers(asked))
    while plain.samples < 30_000 and plain.now < BEGUN_S + 15.0:
        plain.batch()
        tuned.batch()
        assert tuned.now - BEGUN_S <= 1.02 * (plain.now - BEGUN_S) + 0.5


@pytest.mark.parametrize(
    ("disturbance", "job", "workers"),
    [
        # Nothing is lost for good to pauses and hiccups of 12 s, early ones too.
        ({"evaluate_every": 100}, job(0.05, 0.05, 0.01), {5, 6, 7, 8}),
        ({"evaluate_every": 7, "evaluate_s": 0.1}, job(0.05, 0.05, 0.01), {*range(2, 9)}),
        ({"hiccup_every_s": 40.0}, job(0.05, 0.05, 0.01), {5, 6, 7, 8}),
        # A device that is synchronised every 50 steps: it limits, or the data do.
        ({"sync_every": 50}, job(0.002, 0.5, 0.1), {0}),
        ({"sync_every": 50}, job(0.05, 0.05, 0.01), {5, 6, 7, 8}),
        ({"drift": 3.0}, job(0.05, 0.05, 0.02), {*range(6, 13)}),
        ({"neighbour": 1.5, "noise": 0.1}, job(0.04, 1.0, 0.002), {4, 5}),
        ({}, job(8.0, 0.1, 1.0), {8, 9, 10, 11}),
    ],
)  # fmt: skip
def test_within_3_percent_of_best_whatever_disturbs(
    disturbance: dict[str, Any], job: dict[str, Any], workers: set[int]
) -> None:
    training = Training(**job, **disturbance)
    tuner, best = training.tuner(NONE), training.fixed(with_workers(max(workers)))
    seconds = 540.0 if "drift" in disturbance or job["fetch_s"] > 1 else 120.0
    for each in (training, best):
        each.run(60.0)
    assert training.run(seconds) >= 0.97 * best.run(seconds)
    assert tuner.best.num_workers in workers


def test_ranks_in_lockstep_all_get_workers() -> None:
    ranks = [Training(**WAITS, seed=seed) for seed in range(3)]
    for rank in ranks:
        rank.tuner(NONE)
    together(ranks, 40.0)
    fixed = [rank.fixed(with_workers(12)) for rank in ranks]
    assert together(ranks, 10.0) >= 0.97 * together(fixed, 10.0)


def test_the_frozen_stay_the_refused_go_back() -> None:
    training = Training(**WAITS)
    tuner = training.tuner(with_workers(2))
    training.run(30.0)
    best = tuner.best
    assert best != with_workers(2)
    assert tuner.gain is not None
    tuner.decide(Frozen(), training.now)
    training.run(100.0)
    assert tuner.wanted == best
    assert tuner.decide(Refused(Kept.FROZEN()), training.now) == with_workers(2)
    assert tuner.best == with_workers(2)
    assert tuner.gain is None


@pytest.mark.parametrize(
    ("earlier", "batches", "ended_after_s", "may_start"),
    [
        ((0, 0.0), None, None, True),
        ((0, 0.0), 9, None, False),
        ((0, 0.0), 40, 0.9, False),
        ((0, 0.0), 40, 1.1, True),
        ((4, 3.6), None, None, False),  # loaders that the same line made
        ((4, 4.4), None, None, True),
        ((4, 3.6), None, 1.1, True),
    ],
)
def test_in_short_epochs_no_workers_are_tried(
    earlier: tuple[int, float], batches: int | None, ended_after_s: float | None, may_start: bool
) -> None:
    log = Log()
    log.totals.epochs, log.totals.waited_s = earlier
    tuner = Tuner(log, NONE, cores=2, max_workers=32, epoch_batches=batches)
    if ended_after_s is not None:
        tuner.decide(EpochEnded(40, ended_after_s, 0.0), 0.0)
    assert tuner.may_start() is may_start


def test_fewer_workers_are_not_tried_again_and_again() -> None:
    training = Training(fetch_s=0.3, step_s=0.05, cpu=0.05, cores=8, noise=0.03)
    tuner = training.tuner(NONE)
    training.run(60.0)
    best = [tuner.best]
    for _ in range(120):
        training.run(10.0)
        best += [tuner.best] * (tuner.best != best[-1])
    assert len(best) <= 1 + 2
    assert training.run(60.0) >= 0.97 * training.rate(with_workers(12), 60.0)


def metered(seconds: list[tuple[float, float]], in_flight: int = 0) -> tuple[Meter, Reached | None]:
    """A meter of two workers, and what it sees: of each batch, when it was begun and when ready."""
    log, now = Log(), 100.0
    meter, loop = Meter(log, NONE, lambda _: 0.0), log.begin(now)
    loop.started(now)
    meter.begin(Measure(with_workers(2)), now)
    meter.switched(with_workers(2), now, in_flight)
    for number, (fetch_s, wait_s) in enumerate(seconds):
        loop.ask(now)
        now += wait_s
        loop.receive(now, 8, (number % 2, now - fetch_s, now, now, 0.1))
        now += 0.001
    loop.ask(now)
    return meter, meter.seen(now)


def test_queues_that_fill_up_meanwhile_are_no_speed() -> None:
    # GIVEN batches of a second, eight of which lie ready as one has taken fifteen
    _, seen = metered([(1.0, 0.499)] * 8 + [(1.0, 15.0)] + [(1.0, 0.0)] * 8 + [(1.0, 0.499)] * 23)
    assert seen is not None
    assert seen.of.samples_per_s.value == pytest.approx(16, rel=0.02)


def test_what_a_switch_leaves_behind_is_not_measured() -> None:
    # GIVEN eight batches of workers before, and 10 s for the first one of each worker
    left_behind, first, usual = [(0.0, 0.0)] * 8, [(10.0, 10.0)] * 2, [(0.1, 0.05)] * 30
    meter, seen = metered(left_behind + first + usual, in_flight=8)
    assert seen is not None
    assert seen.of.samples_per_s.value == pytest.approx(8 / 0.051, rel=0.05)
    # AND what the first fetches took is in the price of more workers
    assert meter.open_s == pytest.approx(9.8, abs=0.3)


def test_trials_cost_a_hundredth_of_the_training() -> None:
    # GIVEN workers whose first fetch takes 2 s longer, which is more than what may be lost at once
    slow = Training(**job(0.02, 0.05, 0.02, open_s=2.0))
    slow.tuner(NONE)
    slow.run(120.0)
    assert slow.started == 0
    slow.run(120.0)
    assert slow.started > 0


def test_a_failure_tries_half_as_many_later() -> None:
    training = Training(**WAITS)
    tuner = training.tuner(with_workers(2))
    tried, pauses = list[int](), list[float]()
    for _ in range(3):
        begun = training.now
        while tuner.best == with_workers(2):
            training.run(1.0)
        tried.append(tuner.best.num_workers)
        pauses.append(training.now - begun)
        assert tuner.decide(Failed(), training.now) == with_workers(2)
        assert tuner.best == with_workers(2)
        assert tuner.gain is None
    assert tried[0] >= 8
    assert tried[1] <= tried[0] // 2
    assert tried[2] == max(3, tried[1] // 2)
    assert pauses[0] < 30.0 < pauses[1] < 60.0 < pauses[2] < 120.0
    # AND a switch that failed before it was applied leaves nothing behind
    while tuner.wanted == with_workers(2):
        training.run(0.1)
    tuner.decide(Failed(), training.now)
    training.run(600.0)
    assert tuner.best.num_workers > 2


@pytest.mark.parametrize(("ranks", "most"), [(1, 4), (2, 2)])
def test_further_workers_take_half_of_the_ranks_memory(
    ranks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    training = Training(**WAITS, free_bytes=int(8.1 * WORKER_BYTES), memory_bytes=1 << 33)
    tuner = training.tuner(NONE)
    while tuner.best == NONE:
        training.run(0.1)
    assert training.most == most
    # WHEN hardly anything is left
    training.free_bytes = 1
    training.run(30.0)
    assert training.loader.num_workers == most // 2
    # WHEN there is memory again
    training.free_bytes = 1 << 33
    while training.now < 500.0 and tuner.best.num_workers <= 4:
        training.run(5.0)
    assert tuner.best.num_workers > 4


def test_no_more_workers_are_tried_than_allowed() -> None:
    training = Training(**WAITS)
    tuner = training.tuner(with_workers(2), max_workers=7)
    training.run(60.0)
    assert training.most == 7
    assert tuner.best.num_workers == 7


@pytest.mark.parametrize(("job", "is_said"), [(IN_MEMORY, True), (WAITS, False)])
def test_without_workers_it_is_faster_is_only_said(job: dict[str, float], is_said: bool) -> None:
    training = Training(**job)
    tuner = training.tuner(with_workers(4))
    training.run(20.0)
    assert 0 not in {config.num_workers for config in tuner.measured}
    assert any(each.kind == "without_workers" for each in training.loader.result.advice) is is_said


def test_slow_batches_are_decided_on_after_a_few() -> None:
    training = Training(fetch_s=8.0, cpu=0.1, step_s=0.5, noise=0.0)
    tuner = training.tuner(with_workers(2))
    while tuner.wanted == with_workers(2):
        training.batch()
    assert training.log.totals.batches <= 5
    assert tuner.wanted.num_workers >= 10
    while tuner.best == with_workers(2):
        training.batch()
    assert training.log.totals.batches <= 100
    assert tuner.is_trying  # the next look tells whether still more may help
    assert 8.0 / 0.5 <= tuner.best.num_workers <= 1.25 * 8.0 / 0.5


@pytest.mark.parametrize(
    ("every", "long_s", "step_s"),
    [(50, 5.0, 0.005 + 5.0 / 50), (100, 20.0, 0.005), (30, 3.0, 0.005 + 3.0 / 30)],
)
def test_every_50_steps_long_is_no_pause(every: int, long_s: float, step_s: float) -> None:
    log, now = Log(), 0.0
    loop = log.begin(now)
    for number in range(1, 2001):
        loop.ask(now)
        loop.receive(now := now + 0.02, 8, (-1, now - 0.02, now, now, 0.0))
        now += 0.005 + long_s * (number % every == 0)
    loop.ask(now)
    assert log.totals.stepped_s == pytest.approx(2000 * step_s, rel=0.02)
    seen = measured(log.rows)
    assert seen is not None
    assert seen.samples_per_s.value == pytest.approx(8 / (0.02 + step_s), rel=0.03)
