"""A log's seconds are those of the device where there is one that may be asked, and the host's where there is none."""

from threading import Thread
from types import SimpleNamespace

import pytest

from autotune_loader.pipeline import loop_log
from autotune_loader.pipeline.loop_log import Log


class FakeDevice:
    """A device whose work takes time, in a module as torch has them."""

    def __init__(self):
        self.now = self.free = 0.0
        self.is_lost, self.clock_speed = False, 1.0
        self.current_stream = lambda index: self

    def work(self, seconds):
        self.free = max(self.free, self.now) + seconds

    def Event(self, enable_timing):  # noqa: N802
        def record(stream):
            event.at = max(self.free, self.now)

        def query():
            if self.is_lost:
                raise RuntimeError("device-side assert triggered")
            return event.at <= self.now

        def elapsed_time(other):
            return 1e3 * self.clock_speed * (other.at - event.at)

        event = SimpleNamespace(record=record, query=query, elapsed_time=elapsed_time)
        return event


@pytest.fixture
def device(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(loop_log, "_device_in_use", lambda: (device, 0))
    return device


def looped(device, fetch_s, step_s, sync_every, log):
    """100 batches of a loop that launches its steps in 1 ms."""
    loop = log.begin(device.now)
    loop.started(device.now)
    for number in range(1, 101):
        loop.ask(device.now)
        device.now += fetch_s
        loop.receive(device.now, 8, (0, 0.0, 0.0, 0.0, 0.0))
        device.work(step_s)
        device.now += 0.001
        if sync_every and number % sync_every == 0:
            device.now = max(device.now, device.free)
    loop.ask(device.now)
    loop.end(device.now)


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
        looped(device, fetch_s, step_s, sync_every, log)
    assert 0 <= log.behind - (200 - len(log.rows)) <= 2  # where an epoch begins
    device.now = device.free
    log.marks.settle(device.now)
    assert (log.totals.batches, len(log.rows), log.behind) == (200, 200, 0)
    assert log.totals.stepped_s == pytest.approx(200 * step_s)
    assert log.totals.waited_s == pytest.approx(waited_s)


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_host_s_clock_counts_where_the_device_is_lost_or_a_thread_takes_the_batches(
    device, is_lost
):
    log, device.is_lost = Log(), is_lost
    way = (device, 0.009, 0.1, 0, log)
    if is_lost:
        looped(*way)
    else:
        thread = Thread(target=looped, args=way)
        thread.start()
        thread.join()
    assert (log.behind, log.totals.batches) == (0, 100)
    assert (log.totals.waited_s, log.totals.stepped_s) == pytest.approx((100 * 0.009, 100 * 0.001))


@pytest.mark.parametrize("clock_speed", [0.9, 1.1])
def test_the_device_s_clock_does_not_drift_from_the_host_s(device, clock_speed):
    log, device.clock_speed = Log(), clock_speed
    looped(device, 0.099, 0.02, 0, log)
    device.now = device.free
    log.marks.settle(device.now)
    assert log.totals.active_s == pytest.approx(device.now, abs=0.1)


def test_loops_that_take_turns_have_each_their_own_steps(device):
    training, evaluation = Log(), Log()
    for _ in range(3):
        looped(device, 0.009, 0.02, 0, training)
        looped(device, 0.009, 0.015, 0, evaluation)
    device.now = device.free
    for log, step_s in ((training, 0.02), (evaluation, 0.015)):
        log.marks.settle(device.now)
        assert (log.totals.batches, log.totals.stepped_s) == (300, pytest.approx(300 * step_s))


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_a_device_has_not_passed_at_the_end_is_counted(device, is_lost):
    log = Log()
    looped(device, 0.009, 0.1, 0, log)
    assert log.totals.batches < 100
    device.is_lost = is_lost
    log.marks.settle(device.now, is_end=True)
    assert (log.totals.batches, log.behind) == (100, 0)
    assert log.totals.active_s == pytest.approx(device.now, abs=0.1)
    assert min(row.step_s for row in log.rows) >= 0
