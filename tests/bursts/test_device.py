"""A burst and its step on a device that works behind the host, by the device's own time; the device is a fake on a clock."""

import time
from types import SimpleNamespace

import pytest
import torch

from autotune_loader.bursts import loop
from autotune_loader.bursts.bench import warm_up
from autotune_loader.bursts.loop import Cached, LoopRun, OpenLoader
from autotune_loader.bursts.protocol import Request
from autotune_loader.bursts.step import StepError, TrainingStep
from autotune_loader.pipeline.throughput import is_enough
from autotune_loader.values import MAIN_PROCESS, BurstPlan, LoaderConfig
from tests.support import FakeClock
from tests.support.bursts import QUICK

PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01)


class FakeTimeline:
    """A `Timeline` whose marks are the moments at which the device will have done, in order, what it was given so far.

    Its lane, beside the device's work, takes `copy_s` for a batch.
    """

    def __init__(self, now=time.monotonic, sleep=time.sleep, copy_s=0.0):
        self.now, self.sleep, self.copy_s, self.lane = now, sleep, copy_s, self
        self.busy_until = self.lane_until = self.most_ahead_s = 0.0
        self.events = []

    def launch(self, seconds):
        """Give the device so much work."""
        self.busy_until = max(self.busy_until, self.now()) + seconds
        self.most_ahead_s = max(self.most_ahead_s, self.busy_until - self.now())

    def send(self, batch):
        self.lane_until = max(self.lane_until, self.now()) + self.copy_s
        return batch, self.lane_until

    def receive(self, sent):
        self.busy_until = max(self.busy_until, sent[1])
        return sent[0]

    def open(self):
        self.events.append("open")

    def mark(self):
        return max(self.busy_until, self.now())

    def passed(self, mark):
        return mark if mark <= self.now() else None

    def wait(self, mark):
        self.sleep(max(0.0, mark - self.now()))

    def synchronize(self):
        self.events.append("synchronize")
        self.wait(self.busy_until)

    def peak_bytes(self):
        return 0


class Batches:
    """Batches of four with their records: of a worker, which makes them whatever the loop does, or of the loop's process."""

    num_workers = 0  # that the loop would have to end

    def __init__(self, clock, fetch_s, workers):
        self.clock, self.fetch_s, self.workers = clock, fetch_s, workers

    def __iter__(self):
        whole = self.clock()
        while True:
            begun = whole if self.workers else self.clock()
            whole = begun + self.fetch_s
            self.clock.advance(max(0.0, whole - self.clock()))
            worker = 0 if self.workers else MAIN_PROCESS
            yield "batch", (worker, begun, whole, whole, self.fetch_s, 4, None)


def run_of(fetch_s, step_s, copy_s=0.0, ahead=0, host_s=0.001, workers=1):
    """A run in which the host spends `host_s` on handing a step over, and the device `step_s` on doing it."""
    clock = FakeClock()
    timeline = FakeTimeline(clock, clock.sleep, copy_s)

    def move(batch):
        timeline.launch(0.0 if ahead else copy_s)
        return batch

    def train(batch):
        timeline.launch(step_s)
        clock.sleep(host_s)

    request = Request(what="burst", plan=PLAN, config=LoaderConfig(num_workers=workers, device_prefetch=ahead))
    run = LoopRun(request, SimpleNamespace(move=move, train=train), timeline, [].append)
    batches = run.begin(OpenLoader(), Batches(clock, fetch_s, workers))
    while run.deliver(batches) and not run.knows_enough():
        pass
    return run.measurement(), timeline


def test_a_window_ends_in_time_though_asking_takes_long(monkeypatch):
    # GIVEN a loop in which each look at the rate takes 10 ms, so that the next one waits for 4 s
    clock = FakeClock()

    def asked(*args, **kwargs):
        clock.sleep(0.01)
        return is_enough(*args, **kwargs)

    monkeypatch.setattr(loop, "is_enough", asked)
    request = Request(what="burst", plan=PLAN, config=LoaderConfig(num_workers=1))
    run = LoopRun(request, SimpleNamespace(run=lambda batch: clock.sleep(0.01)), None, [].append)
    run.now = clock
    # WHEN it runs
    batches = iter(Batches(clock, 0.001, 1))
    while run.deliver(batches) and not run.knows_enough():
        pass
    # THEN it is no longer than planned
    assert run.measurement().window_s < PLAN.max_s + 0.1


ALONE_SLOWLY = {"fetch_s": 0.010, "step_s": 0.004, "host_s": 1e-4, "workers": 0}


@pytest.mark.parametrize(
    ("times", "period_s", "wait_share"),
    [
        # a host that runs ahead of a busy device shows no waiting: only the copy keeps the device from its step
        ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.002}, 0.012, 2 / 12),
        # a slow loader shows as waiting of the device
        ({"fetch_s": 0.040, "step_s": 0.010}, 0.040, 0.75),
        # a step that takes the host longer than the device takes the host's time
        ({"fetch_s": 0.001, "step_s": 0.002, "host_s": 0.010}, 0.010, 0.0),
        # copies ahead of the step are hidden behind it, and those that take longer bind
        ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.006, "ahead": 2}, 0.010, 0.0),
        ({"fetch_s": 0.002, "step_s": 0.005, "copy_s": 0.020, "ahead": 2}, 0.020, 0.75),
        # a step may be longer than the window, and the host far quicker
        ({"fetch_s": 0.001, "step_s": 10.0}, 10.0, 0.0),
        # a step of one launch, as of a captured graph, is run ahead of by time and not by steps
        ({"fetch_s": 1e-4, "step_s": 0.3, "host_s": 1e-4}, 0.3, 0.0),
        ({"fetch_s": 1e-4, "step_s": 0.001, "host_s": 1e-4}, 0.001, 0.0),
        # what the loop's own process fetches while the device steps costs nothing: the slower of the two sets the rate
        ({"fetch_s": 0.002, "step_s": 0.010, "host_s": 1e-4, "workers": 0}, 0.010, 0.0),
        (ALONE_SLOWLY, 0.0101, 0.6),
        ({**ALONE_SLOWLY, "ahead": 2}, 0.0101, 0.6),
    ],
)
def test_a_run_on_a_device_has_the_devices_times(times, period_s, wait_share):
    found, timeline = run_of(**times)
    step_s = max(times["step_s"], times.get("host_s", 0.0))  # until both are through
    assert found.samples_per_s.value == pytest.approx(4 / period_s, rel=0.02)
    assert found.step_s == pytest.approx(step_s, rel=0.01)
    assert found.wait_share == pytest.approx(wait_share, abs=0.03)
    hidden_s = step_s if times.get("ahead") else 0.0
    assert found.copy_s == pytest.approx(max(0.0, times.get("copy_s", 0.0) - hidden_s), abs=2e-4)
    # copies are no work, nor is waiting
    assert found.gpu_busy_share == pytest.approx(step_s / period_s, abs=0.03)
    # the device is waited for at the edges of the window only, at its end for three steps, or 60 ms
    assert timeline.events == ["open", "synchronize"]
    assert "copy_s" in times or timeline.most_ahead_s <= max(3.1 * step_s, 0.06)
    for trace in found.traces:
        assert trace.fetch_start <= trace.collate_end <= trace.received <= trace.step_end
        assert times.get("workers", 1) or trace.requested <= trace.fetch_start


@pytest.mark.parametrize(("moves", "lies"), [(True, "meta"), (False, "meta"), (False, "cpu")])
def test_the_ceilings_batch_lies_on_the_device_beforehand_where_the_step_takes_it_there(moves, lies):
    timeline, seen = FakeTimeline(), []

    def train(batch):  # brings its batch to the device itself, unless that is done for it
        if lies == "cpu" and batch.device.type != lies:
            raise StepError("lengths must be on the host")
        seen.append(batch)
        timeline.launch(0.002)

    step = TrainingStep(train, "a step", torch.device("meta"), is_own=not moves)
    LoopRun(Request(what="burst", plan=QUICK), step, timeline, [].append).measured(lambda: Cached(torch.ones(4), 4))
    # THEN every step had the very same tensor: it was copied once, outside the window
    assert {id(batch) for batch in seen} == {id(seen[0])}
    assert seen[0].device.type == lies


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        ([5.0, 0.5, 0.2, 0.01, 0.01, 0.01], 5),  # compiled, compiled again, a graph recorded, settled
        ([0.2, 0.01, 0.01], 3),  # cuDNN chose its algorithms
        ([2.0, 2.0, 2.0], 2),  # slow by nature: waiting longer tells nothing
        ([30.0, 0.01, 0.01], 3),  # the first, however long, says nothing of the next
        ([0.1 * 2**-i for i in range(20)], 10),  # never settles
    ],
)
def test_the_step_is_warmed_up_until_it_has_settled(seconds, steps):
    clock, left = FakeClock(), iter(seconds)
    timeline = FakeTimeline(clock, clock.sleep)
    step = TrainingStep(lambda batch: timeline.launch(next(left)), "a step", torch.device("cpu"))
    warm_up(step, torch.ones(1), timeline)
    assert len(list(left)) == len(seconds) - steps
