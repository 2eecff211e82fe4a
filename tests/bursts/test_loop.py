"""The loop of a burst: the times of its host and its device, what it takes of the machine, and the
end of its workers."""

import contextlib
import os
import threading
import time
from itertools import pairwise
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from autotune_loader.bursts import bench, loop
from autotune_loader.bursts.loop import KEPT_FIRST, KEPT_LAST, LoopRun, OpenLoader, Window
from autotune_loader.bursts.packing import read_archive, write_archive
from autotune_loader.bursts.protocol import Allowance, Request
from autotune_loader.bursts.step import TrainingStep
from autotune_loader.machine.kernel import memfd
from autotune_loader.machine.limits import SharedMemory
from autotune_loader.machine.nvml import GpuUse
from autotune_loader.machine.processes import TreeUse
from autotune_loader.pipeline.equal import is_equal
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.throughput import is_enough
from autotune_loader.pipeline.tracing import Handed, Stamp, make_traced_loader
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values import MAIN_PROCESS, BurstPlan, LoaderConfig, MemoryUse
from tests.support import FakeClock
from tests.support.bursts import TWO_WORKERS, Made, measured, opened, workload
from tests.support.device import Device

PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01)


class FakeTimeline(Device):
    """The device as a `Timeline`. Its lane, beside its work, takes `copy_s` for a batch."""

    def __init__(self, clock, copy_s=0.0):
        super().__init__(clock)
        self.copy_s, self.lane = copy_s, self
        self.lane_until = self.most_ahead_s = 0.0
        self.events, self.watched = [], []
        self.gpu = SimpleNamespace(begin=lambda: self.watched.append(clock()), end=self.use)

    def launch(self, seconds):
        super().launch(seconds)
        self.most_ahead_s = max(self.most_ahead_s, self.free_at - self.now())

    def send(self, batch):
        self.lane_until = max(self.lane_until, self.now()) + self.copy_s
        return batch, self.lane_until

    def receive(self, sent):
        self.free_at = max(self.free_at, sent[1])
        return sent[0]

    def open(self):
        self.events.append("open")

    def synchronize(self):
        self.events.append("synchronize")
        self.wait(self.free_at)

    def peak_bytes(self):
        return 0

    def use(self, start, end):
        """What NVML tells of a window."""
        self.watched += [start, end]
        return GpuUse(0.64, 1 << 30)


class Batches:
    """Batches of four with their records: of a worker, which makes them whatever the loop does, or
    of the loop's own process."""

    num_workers = 0  # that the loop would have to end

    def __init__(self, clock, fetch_s, workers):
        self.clock, self.fetch_s, self.workers = clock, fetch_s, workers

    def __iter__(self):
        whole, worker = self.clock(), 0 if self.workers else MAIN_PROCESS
        while True:
            begun = whole if self.workers else self.clock()
            whole = begun + self.fetch_s
            self.clock.advance(max(0.0, whole - self.clock()))
            fetch = worker, begun, whole, whole, self.fetch_s, 4, None
            yield Handed(Stamp(), "batch", Stamp(), fetch)


class Nothing(list):
    num_workers = 0


def run_of(fetch_s, step_s, copy_s=0.0, ahead=0, host_s=0.001, workers=1, clock=None):
    """The host spends `host_s` on handing a step over, and the device `step_s` on doing it."""
    clock = clock or FakeClock()
    timeline = FakeTimeline(clock, copy_s)

    def move(batch):
        timeline.launch(0.0 if ahead else copy_s)
        return batch

    def train(batch):
        timeline.launch(step_s)
        clock.sleep(host_s)

    config = LoaderConfig(num_workers=workers, device_prefetch=ahead)
    request = Request(what="burst", plan=PLAN, config=config)
    run = LoopRun(request, SimpleNamespace(move=move, train=train), timeline, [].append)
    run.now = clock
    batches = run.begin(OpenLoader(), Batches(clock, fetch_s, workers))
    while run.deliver(batches) and not run.knows_enough():
        pass
    return run.measurement(), timeline


@pytest.mark.parametrize(
    ("workers", "asked_at"), [(0, (7, 105)), (1, (7, 105)), (4, (7, 8, 12, 105))]
)
def test_a_window_ends_in_time(workers, asked_at, monkeypatch):
    # GIVEN looks at the rate that take 10 ms each, so that the next one would wait for 4 s
    def asked(*args, **kwargs):
        clock.sleep(0.01)
        asks.append(kwargs["delivered"])
        assert kwargs["run"] == 0  # no reading tells of any
        return is_enough(*args, **kwargs)

    clock, asks = FakeClock(), []
    monkeypatch.setattr(loop, "is_enough", asked)
    found, _ = run_of(0.001, 0.01, workers=workers, clock=clock)
    # THEN it is no longer than planned
    assert found.window_s < PLAN.max_s + 0.1
    assert asks == [*asked_at]  # in the first rounds, and at its end
    assert len(found.traces) == asked_at[-1]


def test_on_the_cpu_the_hosts_times_count(monkeypatch):
    def close(window, workers, nursery):
        asked.append((workers, nursery))
        return {}

    clock, phases, told, asked = FakeClock(), [], [], []
    monkeypatch.setattr(Window, "close", close)
    home = SimpleNamespace(pids=[WORKER])
    step = SimpleNamespace(run=lambda batch: clock.sleep(0.008))
    config = LoaderConfig(num_workers=0)
    request = Request(what="burst", plan=PLAN, config=config, reads_pss=False)
    run = LoopRun(request, step, None, phases.append, lambda *what: told.append(what), home)
    run.now = clock
    found = run.measured(lambda: Batches(clock, 0.002, 0))
    assert phases == ["start", "first_batch", "batches", "shutdown"]
    assert found.samples_per_s.value == pytest.approx(4 / 0.010)
    assert found.step_s == pytest.approx(0.008)
    assert found.wait_share == pytest.approx(0.2)
    assert found.gpu_busy_share is found.stages is None
    assert asked == [([], [WORKER])]
    # AND without a batch it says so
    none = LoopRun(request, step, None, phases.append).measured(Nothing)
    assert (none.kind, none.phase) == ("no_data", "first_batch")
    assert told == []


def test_a_batch_that_failed_is_forgotten():
    """Else the next one would have begun with it."""
    data = DataSide.from_dataset(Made(lambda key: 1 // left.pop()), batch_size=1)
    left, begun = [1, 0], []
    for error in (ZeroDivisionError, None):
        with pytest.raises(error) if error else contextlib.nullcontext(), OpenLoader() as own:
            begun.append(time.monotonic())
            handed = next(own.open(make_traced_loader(data, LoaderConfig(), Reading(data))))
    assert handed.fetch[1] > begun[1]


def test_an_error_is_told_with_its_phase():
    def fail():
        raise error

    error, told = OSError(24, "Too many open files"), []
    request = Request(what="burst", plan=PLAN)
    run = LoopRun(request, None, None, [].append, lambda *what: told.append(what))
    assert run.measured(fail).kind == "descriptors"
    assert told == [(error, "start")]


def test_buffers_of_any_size_travel():
    values = [np.arange(size, dtype=np.uint8) for size in (255, 256, 257)]
    with os.fdopen(memfd("test"), "rb") as file:
        write_archive(file.fileno(), values, 1 << 20)
        assert is_equal(read_archive(file.fileno()), values)


def test_a_record_keeps_first_and_last_traces():
    found, _ = run_of(1e-4, 1e-4, host_s=1e-4)
    assert len(found.traces) == KEPT_FIRST + KEPT_LAST
    steps_s = [later.step_end - one.step_end for one, later in pairwise(found.traces)]
    (left_out,) = [at for at, seconds in enumerate(steps_s) if seconds > 2e-4]
    assert left_out == KEPT_FIRST - 1
    # AND the rate is that of all of them
    assert found.samples_per_s.value == pytest.approx(4 / 1e-4, rel=0.02)
    assert found.samples > 4 * len(found.traces)


ALONE_SLOWLY = {"fetch_s": 0.010, "step_s": 0.004, "host_s": 1e-4, "workers": 0}


@pytest.mark.parametrize(("times", "period_s", "wait_share"), [
    # a host that runs ahead of a busy device shows no waiting: only the copy keeps it from its step
    ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.002}, 0.012, 2 / 12),
    # a slow loader shows as waiting of the device
    ({"fetch_s": 0.040, "step_s": 0.010}, 0.040, 0.75),
    # a step that takes the host longer than the device takes the host's time
    ({"fetch_s": 0.001, "step_s": 0.002, "host_s": 0.010}, 0.010, 0.0),
    # copies ahead of the step are hidden behind it, and those that take longer bind
    ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.006, "ahead": 2}, 0.010, 0.0),
    ({"fetch_s": 0.002, "step_s": 0.005, "copy_s": 0.020, "ahead": 2}, 0.020, 0.75),
    # a step may be longer than the window
    ({"fetch_s": 0.001, "step_s": 10.0}, 10.0, 0.0),
    # a step of one launch, as of a captured graph, is run ahead of by time and not by steps
    ({"fetch_s": 1e-4, "step_s": 0.001, "host_s": 1e-4}, 0.001, 0.0),
    # what the loop's own process fetches while the device steps costs nothing: the slower of the
    # two sets the rate
    ({"fetch_s": 0.002, "step_s": 0.010, "host_s": 1e-4, "workers": 0}, 0.010, 0.0),
    (ALONE_SLOWLY, 0.0101, 0.6),
    ({**ALONE_SLOWLY, "ahead": 2}, 0.0101, 0.6),
])  # fmt: skip
def test_a_run_has_the_devices_times(times, period_s, wait_share):
    found, timeline = run_of(**times)
    step_s = max(times["step_s"], times.get("host_s", 0.0))  # until both are through
    assert found.samples_per_s.value == pytest.approx(4 / period_s, rel=0.02)
    assert found.step_s == pytest.approx(step_s, rel=0.01)
    assert found.wait_share == pytest.approx(wait_share, abs=0.03)
    hidden_s = step_s if times.get("ahead") else 0.0
    assert found.copy_s == pytest.approx(max(0.0, times.get("copy_s", 0.0) - hidden_s), abs=2e-4)
    # copies are no work, nor is waiting
    assert found.gpu_busy_share == pytest.approx(step_s / period_s, abs=0.03)
    # NVML is asked of the window alone, from its first step on
    assert found.gpu_utilization == 0.64
    assert found.gpu_used_bytes == 1 << 30
    begun, start, end = timeline.watched
    assert begun < end == found.traces[-1].step_end
    assert end - start == pytest.approx(found.window_s)
    # the device is waited for at the edges of the window only, at its end for three steps, or 60 ms
    assert timeline.events == ["open", "synchronize"]
    assert "copy_s" in times or timeline.most_ahead_s <= max(3.1 * step_s, 0.06)
    for trace in found.traces:
        assert trace.fetch_start <= trace.collate_end <= trace.received <= trace.step_end
        assert times.get("workers", 1) or trace.requested <= trace.fetch_start


@pytest.mark.parametrize(("seconds", "steps"), [
    ([5.0, 0.5, 0.2, 0.01, 0.01, 0.01], 5),  # compiled, again, a graph recorded, settled
    ([0.2, 0.01, 0.01], 3),  # cuDNN chose its algorithms
    ([2.0, 2.0, 2.0], 2),  # slow by nature: waiting longer tells nothing
    ([30.0, 0.01, 0.01], 3),  # the first, however long, says nothing of the next
    ([0.1 * 2**-i for i in range(20)], 10),  # never settles
])  # fmt: skip
def test_the_step_is_warm_when_settled(seconds, steps, monkeypatch):
    clock, left = FakeClock(), iter(seconds)
    timeline = FakeTimeline(clock)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=clock))
    step = TrainingStep(lambda batch: timeline.launch(next(left)), "a step", torch.device("cpu"))
    bench.warm_up(step, torch.ones(1), timeline)
    assert len(list(left)) == len(seconds) - steps
    assert timeline.events == ["open"] + ["synchronize"] * steps


@pytest.mark.parametrize(("allowed", "most_workers", "pinning_s", "blocks"), [
    # what a worker a core has in its queue and in hand, and the loop's
    (Allowance(4), None, 0.1, 4 * 2 + 1 + 3),
    (Allowance(4), 1, 0.1, 2 + 1 + 3),
    (Allowance(4), 0, 0.1, 1 + 3),
    (Allowance(64), None, 0.3, 7),  # 2 s
    (Allowance(64, 1000), None, 0.0, 6),  # a tenth of the memory in blocks of 16 bytes
    (Allowance(64, 100), None, 0.0, 0),
])  # fmt: skip
def test_pages_are_locked_for_a_loops_batches(
    allowed, most_workers, pinning_s, blocks, monkeypatch
):
    def pin(batch):
        pinned.append(batch)
        clock.sleep(pinning_s)

    clock, batch, pinned = FakeClock(), [torch.zeros(3)], []
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(bench, "pin_memory", pin)
    bench.lock_pages(batch, allowed, most_workers)
    assert len(pinned) == blocks


def test_what_cannot_be_pinned_is_no_trouble(monkeypatch):
    monkeypatch.setattr(bench, "pin_memory", None)
    for batch in ([torch.zeros(3)], "no tensor"):
        bench.lock_pages(batch, Allowance(4, 1000), None)


WORKER, LATE, APART = 7, 8, 9
HOME = ([WORKER], [LATE])
"""Its workers, and the nursery with its root."""


class Machine:
    """A process (1) with its workers, as a test has it: CPU seconds and bytes read by process.
    Walks through all are counted."""

    def __init__(self, monkeypatch):
        self.walks = 0
        for name in ("time", "tree", "tree_use", "tree_pss", "host_busy_s", "shared_memory"):
            monkeypatch.setattr(loop, name, getattr(self, name))
        monkeypatch.setattr(
            loop, "without_nursery", lambda *pids: (2, 30) if pids == HOME else None
        )
        monkeypatch.setattr(loop, "borrowed_bytes", lambda pids: 400 * len(pids))

    def at(self, now, busy_s, uses, free_bytes=1000):
        self.now, self.busy_s, self.uses, self.free_bytes = now, busy_s, uses, free_bytes

    def tree_pss(self, members):
        return len(members)

    def shared_memory(self):
        return SharedMemory(self.free_bytes, 9000)

    @property
    def time(self):
        return SimpleNamespace(monotonic=lambda: self.now)

    def tree(self, pid):
        self.walks += 1
        return tuple(self.uses)

    def tree_use(self, members):
        seen = [self.uses[each] for each in members if each in self.uses]
        cpu_s, read = (sum(column) for column in zip((0.0, 0), *seen, strict=True))
        return TreeUse(cpu_s=cpu_s, rss_bytes=5, read_bytes=read) if seen else None

    def host_busy_s(self, cpus):
        return [self.busy_s / 4] * 4


def test_shares_and_bytes_are_the_windows_alone(monkeypatch):
    # GIVEN 6 s of start-up, then 2 s on 4 CPUs: the tree takes 3 s and reads 1,000 bytes, and the
    # machine is busy for 5 s
    machine = Machine(monkeypatch)
    machine.at(1.0, 4.0, {1: (1.0, 50), WORKER: (3.0, 20)})
    watched, silent = (Window(2, [APART], reads_pss=reads_pss) for reads_pss in (True, False))
    for each in (watched, silent):
        each.watch()
    machine.at(6.0, 10.0, {1: (4.0, 50), WORKER: (3.0, 20)})
    walks = machine.walks
    for each in (watched, silent):
        each.open()
    assert machine.walks == walks, "its beginning asks known processes only"
    uses = {1: (5.0, 50), WORKER: (4.0, 920), LATE: (1.0, 100), APART: (7.0, 7)}
    machine.at(8.0, 15.0, uses, free_bytes=300)
    # WHEN it is closed THEN the tree has had 1.5 of 2 cores, and a quarter of the CPUs was others'
    found = watched.close()
    assert found["cpu_share"] == pytest.approx(0.75)
    assert found["foreign_cpu_share"] == pytest.approx(0.25)
    assert found["read_bytes"] == 1000
    # AND memory is read only where it is asked for
    assert found["memory"] == MemoryUse(rss_bytes=5, pss_bytes=3 + 400, shm_bytes=700)
    cloned = watched.close(*HOME)["memory"]
    assert cloned == MemoryUse(rss_bytes=5 + 2, pss_bytes=3 + 30 + 400, shm_bytes=700)
    assert watched.close([], [LATE])["memory"] is None
    assert silent.close()["memory"] is None
    # AND ticks of the host and of the tree that differ make no negative load, nor do what ends
    machine.at(8.0, 12.0, {1: (9.0, 20)}, free_bytes=1001)
    found = watched.close()
    assert found["foreign_cpu_share"] == 0.0
    assert found["read_bytes"] == 0
    assert found["memory"].shm_bytes == 0


def rows(slow=None):
    """In workers, one sample may take long."""
    read = []

    def make(index):
        read.append(index)
        time.sleep(30.0 if len(read) == slow and get_worker_info() is not None else 0.001)
        return torch.zeros(4)

    return Made(make, 4096)


HELD_BYTES = 200 << 20
"""As other processes come and go, what counts for one of torch's libraries changes by some MiB: 10%
of this is far more."""


@pytest.mark.system
@pytest.mark.process
def test_memory_of_workers_is_told_within_10_percent():
    plan = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=60.0)
    held = []

    def hold(worker):
        held.append(b"x" * HELD_BYTES)

    def wait(worker):
        time.sleep(0.5)

    # GIVEN two probes that are open at a time: what is in both, such as torch's libraries, counts
    # by halves in each, and workers that are forks have none of their own
    of_holding, of_plain = (
        workload(rows(), 8, worker_init_fn=begin, multiprocessing_context="fork")
        for begin in (hold, wait)
    )
    with opened(of_holding) as holding, opened(of_plain) as plain:
        large, small = (measured(each.probe, TWO_WORKERS, plan) for each in (holding, plain))
    for name in ("pss_bytes", "rss_bytes"):
        more = getattr(large.memory, name) - getattr(small.memory, name)
        assert more == pytest.approx(2 * HELD_BYTES, rel=0.1)
    # AND the start of workers, which is once an epoch, is no part of the rate
    assert small.first_batch_s > 0.5
    assert small.window_s <= small.traces[-1].step_end - small.traces[0].received


@pytest.mark.process
def test_workers_end_at_once_with_their_burst():
    # GIVEN workers that are at a slow sample when a burst with a slow step ends
    plan = BurstPlan(max_s=0.02, min_s=0.01, relative_error=0.9, deadline_s=60.0)
    slow = TrainingSide(train_step=lambda model, batch: time.sleep(0.03))
    with opened(workload(rows(slow=6), 1, training=slow)) as probe:
        begun = time.monotonic()
        found = measured(probe.probe, TWO_WORKERS, plan)
        # THEN it does not wait for the 30 s of the sample
        assert time.monotonic() - begun - found.first_batch_s < 20.0


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_the_pinning_thread_ends_before_its_workers(monkeypatch):
    def kill(worker):
        killed.append(pinning.is_alive())
        worker.terminate()

    killed = []
    with OpenLoader() as open_loader:
        iterator = open_loader.open(DataLoader(range(1 << 20), num_workers=2))
        # GIVEN a thread on the workers' queue, as torch has it where there is a GPU
        results, ended = iterator._worker_result_queue, threading.Event()

        def pin():
            while not ended.is_set():
                results.get()

        pinning = threading.Thread(target=pin, daemon=True)
        iterator._pin_memory_thread, iterator._pin_memory_thread_done_event = pinning, ended
        pinning.start()
        monkeypatch.setattr(BaseProcess, "kill", kill)
    assert killed == [False, False]
