"""A log's seconds are the device's where one may be asked, and the host's where there is none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.pipeline import loop_log
from autotune_loader.pipeline.loop_log import Log, longest_s
from tests.support import FakeClock
from tests.support.device import Device

LAUNCH_S = 0.001
FETCH = (0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(loop_log, "_device_in_use", lambda: (device, 0))
    return device


def looped(device, fetch_s, step_s, log, sync_every=0):
    """Run 100 batches of a loop that launches its steps in 1 ms."""
    now = device.now
    loop = log.begin(now())
    loop.started(now())
    for number in range(1, 101):
        loop.ask(now())
        loop.receive(now.advance(fetch_s), 8, FETCH)
        device.launch(step_s)
        now.advance(LAUNCH_S)
        if sync_every and number % sync_every == 0:
            device.wait(device.mark())
    loop.ask(now())
    loop.end(now())


def settled(device, *logs):
    device.wait(device.mark())
    for log in logs:
        log.marks.settle(device.now())


@pytest.mark.parametrize(
    ("fetch_s", "step_s", "sync_every", "waited_s"),
    [
        (0.009, 0.1, 0, 0.009),
        (0.009, 0.1, 50, 4 * 0.009),  # after a synchronisation the device has nothing to do
        (0.099, 0.02, 0, 0.099 + 199 * 0.08),
        (0.099, 0.02, 10, 20 * 0.099 + 180 * 0.08),
    ],
)
def test_the_loop_waits_when_the_device_does(device, fetch_s, step_s, sync_every, waited_s):
    log = Log()
    for _ in range(2):
        looped(device, fetch_s, step_s, log, sync_every)
    assert 0 <= log.behind - (200 - len(log.rows)) <= 2  # where an epoch begins
    settled(device, log)
    assert log.totals.batches == len(log.rows) == 200
    assert log.behind == 0
    assert log.totals.stepped_s == pytest.approx(200 * step_s)
    assert log.totals.waited_s == pytest.approx(waited_s)


@pytest.mark.parametrize("is_lost", [True, False])
def test_otherwise_the_hosts_clock_counts(device, is_lost, monkeypatch):
    # GIVEN a lost device, or a thread that takes the batches while the main thread trains
    monkeypatch.setattr(loop_log, "is_main_thread_waiting", lambda: False)
    log, device.is_lost = Log(), is_lost
    with ThreadPoolExecutor() as threads:
        run = (lambda function, *what: function(*what)) if is_lost else threads.submit
        run(looped, device, 0.009, 0.1, log)
    assert log.behind == 0
    assert log.totals.batches == 100
    assert log.totals.waited_s == pytest.approx(100 * 0.009)
    assert log.totals.stepped_s == pytest.approx(100 * LAUNCH_S)


def test_an_epoch_begins_when_the_device_has_come(device):
    """Not while it does what was queued before: by it the tuner tells how long an epoch takes."""
    log = Log()
    looped(device, 0.009, 0.1, log)
    queued_until = device.mark()
    assert queued_until > device.now()
    loop = log.begin(device.now())
    settled(device, log)
    assert loop.begun == pytest.approx(queued_until)


def test_a_training_thread_counts_as_the_device_does(device, monkeypatch):
    """As with Ray Train, whose main thread waits for it."""
    monkeypatch.setattr(loop_log, "is_main_thread_waiting", lambda: True)
    log = Log()
    thread = threading.Thread(target=looped, args=(device, 0.009, 0.1, log))
    thread.start()
    thread.join()
    settled(device, log)
    assert log.totals.stepped_s == pytest.approx(100 * 0.1)


@pytest.mark.parametrize("clock_speed", [0.9, 1.1])
def test_the_devices_clock_does_not_drift(device, clock_speed):
    log, device.clock_speed = Log(), clock_speed
    looped(device, 0.099, 0.02, log)
    settled(device, log)
    assert log.totals.active_s == pytest.approx(device.now(), abs=0.1)


def test_loops_in_turns_have_their_own_steps(device):
    logs = {0.02: Log(), 0.015: Log()}
    for _ in range(3):
        for step_s, log in logs.items():
            looped(device, 0.009, step_s, log)
    settled(device, *logs.values())
    for step_s, log in logs.items():
        assert log.totals.stepped_s == pytest.approx(300 * step_s)


@pytest.mark.parametrize("is_lost", [True, False])
def test_unfinished_work_counts_at_the_end(device, is_lost):
    log = Log()
    looped(device, 0.009, 0.1, log)
    assert log.totals.batches < 100
    device.is_lost = is_lost
    log.marks.settle(device.now(), is_end=True)
    assert log.totals.batches == 100
    assert log.behind == 0
    assert log.totals.active_s == pytest.approx(device.now(), abs=0.1)
    assert min(row.step_s for row in log.rows) >= 0


def test_a_device_is_looked_for_ever_more_seldom(monkeypatch):
    log, looks = Log(), []
    monkeypatch.setattr(loop_log, "_device_in_use", lambda: looks.append(log.marks.looks))
    for _ in range(3):
        loop = log.begin(0.0)
        for now in range(40):
            loop.ask(now)
            loop.receive(now, 8, FETCH)
    # THEN a loop that begins after 80 batches counts anew
    assert looks == [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64]


LONGEST = [
    # steps; in a series of these what takes longer is a pause
    ([0.001], 0.5),
    ([1.0, 2.0], 20.0),  # of the median
    ([1.0, 1.5, 9.0], 30.0),
    ([0.001] * 236 + [1.0, 2.0, 3.0, 4.0], 2.0),  # it has come three times, and once in 80 steps
    ([0.001] * 237 + [2.0, 3.0, 4.0], 0.5),
    ([0.001] * 76 + [1.0, 2.0, 3.0], 2.0),
    ([0.001] * 77 + [2.0, 3.0], 0.5),
]


@pytest.mark.parametrize(("seconds", "longest"), LONGEST)
def test_a_pause_is_far_from_usual_and_rare(seconds, longest):
    assert longest_s([*reversed(seconds)]) == pytest.approx(longest)


SECONDS = st.sampled_from([0.0, 0.001, 0.02, 0.2])  # all of them together are no pause
BATCHES = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.booleans()), max_size=12)


@settings(max_examples=60)
@given(epochs=st.lists(st.tuples(BATCHES, st.booleans()), max_size=4), has_device=st.booleans())
def test_each_second_of_an_epoch_counts_once(epochs, has_device):
    device, log, expected_s = Device(FakeClock(1.0)), Log(), 0.0
    now = device.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_log, "_device_in_use", lambda: (device, 0) if has_device else None)
        # WHEN the host fetches and works, the device works, and epochs are left early, in any order
        for batches, is_left in epochs:
            loop, begun = log.begin(now()), device.mark()
            loop.started(now.advance(0.01))
            for fetch_s, host_s, step_s, may_skip in batches:
                asked = now()
                if may_skip and loop.may_skip(asked):
                    loop.skip(asked, now.advance(fetch_s), 4)
                else:
                    loop.ask(asked)
                    loop.receive(now.advance(fetch_s), 4, FETCH)
                last = device.mark()
                now.advance(host_s)
                device.launch(step_s if has_device else 0.0)
            assert loop.batches == len(batches)
            if not is_left:
                loop.ask(now())
                loop.end(now.advance(0.02))
            expected_s += (last if is_left and batches else device.mark()) - begun
        settled(device, log)
    # THEN all seconds up to what a loop did last are waiting or a step, and no batch is lost
    batches = sum(len(batches) for batches, _ in epochs)
    assert log.totals.batches == batches
    assert log.totals.epochs == sum(bool(batches) for batches, _ in epochs)
    starts_s = [0.01 + sum(each[0] for each in batches[:1]) for batches, _ in epochs]
    assert has_device or log.totals.started_s == pytest.approx(sum(starts_s))
    assert log.totals.samples == 4 * batches
    assert log.totals.waited_s + log.totals.stepped_s == pytest.approx(expected_s, abs=1e-6)
    assert log.totals.asking_s == pytest.approx(
        sum(each[0] for batches, _ in epochs for each in batches)
    )
