"""Loops within one another, and checkpoints: their seconds add up to the wall."""

import random

import pytest

from autotune_loader.pipeline import loop_log
from autotune_loader.pipeline.loop_log import Log, Loop, saving
from tests.support.simulation import FakeClock


@pytest.fixture
def now(monkeypatch):
    clock = FakeClock(1.0)
    monkeypatch.setattr(loop_log, "beside", loop_log.Beside())
    monkeypatch.setattr(loop_log.time, "monotonic", clock)
    return clock


class Training:
    """Loops over a loader by a clock, with seconds of their own."""

    def __init__(self, now, log=None):
        self.now, self.log, self.wall_s = now, log or Log(), 0.0

    def epoch(self, batches, step, wait_s=0.25, *, is_left=False):
        begun = self.now()
        loop = Loop(self.log, begun)
        self.log.current = loop
        self.now.sleep(0.5)
        loop.started(self.now())
        for _ in range(batches):
            loop.ask(self.now())
            self.now.sleep(wait_s)
            loop.receive(self.now(), 1)
            last = self.now()
            step()
        if is_left:
            self.wall_s += last - begun
            return
        loop.ask(self.now())
        self.now.sleep(wait_s)
        loop.end(self.now())
        self.wall_s += self.now() - begun


@pytest.mark.parametrize("is_left", [False, True])
def test_a_loop_within_a_step_is_evaluation(now, is_left):
    inner, outer = Training(now), Training(now)

    def step():
        now.sleep(0.125)
        inner.epoch(3, lambda: now.sleep(0.125), is_left=is_left)
        inner.epoch(2, lambda: now.sleep(0.125))

    outer.epoch(4, step)
    totals = outer.log.totals
    assert totals.evaluated_s == pytest.approx(inner.wall_s)
    assert totals.stepped_s == pytest.approx(4 * (0.125 + (0.125 if is_left else 0.0)))
    assert totals.wall_s == pytest.approx(outer.wall_s)
    assert inner.log.totals.evaluated_s == 0.0
    assert inner.log.totals.wall_s == pytest.approx(inner.wall_s)


def test_loops_side_by_side_are_no_evaluation(now):
    logs = Log(), Log()
    both = [Loop(log, now()) for log in logs]
    for _ in range(3):
        for loop in both:
            loop.ask(now())
            now.sleep(0.25)
            loop.receive(now(), 1)
        now.sleep(0.125)
    assert [log.totals.evaluated_s for log in logs] == [0.0, 0.0]


def test_a_checkpoint_counts_once(now):
    training = Training(now)

    def step():
        now.sleep(0.125)
        with saving():
            now.sleep(1.0)
            with saving():
                now.sleep(1.0)

    training.epoch(3, step)
    with saving():
        now.sleep(9.0)  # between two loops
    training.epoch(3, step)
    totals = training.log.totals
    assert totals.saved_s == pytest.approx(12.0)
    assert totals.stepped_s == pytest.approx(6 * 0.125)
    assert totals.wall_s == pytest.approx(training.wall_s)


def test_a_checkpoint_of_an_evaluation_is_evaluation(now):
    inner, outer = Training(now), Training(now)

    def saves():
        with saving():
            now.sleep(1.0)

    def step():
        now.sleep(0.25)
        inner.epoch(2, saves)
        saves()

    outer.epoch(3, step)
    totals = outer.log.totals
    assert totals.stepped_s == pytest.approx(3 * 0.25)
    assert totals.saved_s == pytest.approx(3 * 1.0)
    assert totals.evaluated_s == pytest.approx(inner.wall_s)
    assert inner.log.totals.saved_s == pytest.approx(3 * 2 * 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_seconds_add_up_to_the_wall(seed, now):
    draw = random.Random(seed)
    logs = [Log() for _ in range(3)]
    walls = {id(log): 0.0 for log in logs}

    def loop(depth):
        log = logs[depth]
        training = Training(now, log)

        def step():
            now.sleep(draw.choice([0.0, 0.0625, 0.125, 3.0]))
            if depth < 2 and draw.random() < 0.3:
                for _ in range(draw.randint(1, 2)):
                    loop(depth + 1)
            if draw.random() < 0.2:
                with saving():
                    now.sleep(0.25)

        training.epoch(draw.randint(1, 6), step, draw.random(), is_left=draw.random() < 0.3)
        walls[id(log)] += training.wall_s

    for _ in range(4):
        loop(0)
    for log in logs:
        assert log.totals.wall_s == pytest.approx(walls[id(log)])


def test_evaluation_within_is_noted_whole(now):
    """A batch is counted without a row where neither a loop nor a checkpoint came between."""
    training = Loop(log := Log(), now())
    training.ask(now())
    training.receive(now(), 1)
    log.marks.looks = 2  # a device is looked for ever more seldom
    assert training.may_skip(now())
    with saving():
        now.sleep(0.125)
    assert not training.may_skip(now())
    training.ask(now())
    training.receive(now(), 1)
    now.sleep(0.125)
    Loop(Log(), now())
    assert not training.may_skip(now())
