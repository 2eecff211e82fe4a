from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune_loader.machine.gpus import Gpus
from autotune_loader.machine.host import HostCpu
from autotune_loader.machine.limits import SharedMemory
from autotune_loader.machine.meters.cpu import cpu_shares
from autotune_loader.machine.meters.process_tree import MemoryGuard, PssSample, TreeMeter, memory_of, pss_slope
from autotune_loader.machine.processes import ProcessTree, TreeUse
from tests.support import FakeClock, FakeGpu, FakeGpus

MIB = 2**20


class FakeTree(ProcessTree):
    """A tree that is as large as a test says."""

    def __init__(self, rss_bytes: int, pss_bytes: int | None) -> None:
        super().__init__(os.getpid())
        self.rss, self.pss, self.pss_reads = rss_bytes, pss_bytes, 0

    def use(self) -> TreeUse | None:
        return TreeUse(processes=3, cpu_s=1.0, rss_bytes=self.rss)

    def pss_bytes(self) -> int | None:
        self.pss_reads += 1
        return self.pss


def use(rss_bytes: int, cpu_s: float = 0.0) -> TreeUse:
    return TreeUse(processes=1, cpu_s=cpu_s, rss_bytes=rss_bytes)


def pss(at: float, pss_bytes: int, processes: int = 4) -> PssSample:
    return PssSample(at=at, pss_bytes=pss_bytes, processes=processes)


def test_memory_is_the_peak_of_each_kind() -> None:
    # GIVEN a burst in which everything rose and fell
    shm = [SharedMemory(free_bytes=free, total_bytes=100) for free in (90, 60, 95)]
    # WHEN
    memory = memory_of([use(5), None, use(9), use(2)], [pss(1.0, 4), pss(2.0, 7), pss(3.0, 1, processes=1)], shm)
    # THEN shared memory counts from what was there before
    assert memory is not None
    assert (memory.rss_bytes, memory.pss_bytes, memory.shm_bytes) == (9, 7, 30)


def test_what_was_not_seen_is_none() -> None:
    memory = memory_of([use(5)], [], [None])
    assert memory is not None
    assert (memory.pss_bytes, memory.pss_slope_bytes_per_s, memory.shm_bytes) == (None, None, None)


def test_a_tree_that_was_never_seen_has_no_memory() -> None:
    assert memory_of([None, None], [], [None]) is None


def test_the_slope_is_the_growth_per_second_that_holds_on() -> None:
    assert pss_slope([pss(1.0, 100), pss(2.0, 200), pss(4.0, 400)]) == pytest.approx(100.0)
    assert pss_slope([pss(1.0, 100), pss(2.0, 150), pss(4.0, 400)]) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("samples", "slope"),
    [
        ([pss(1.0, 100), pss(1.5, 400), pss(2.25, 405), pss(3.4, 406)], 0.9),  # first touches of pages, which end
        ([pss(1.0, 100), pss(1.5, 400), pss(2.25, 400)], 0.0),
        ([pss(1.0, 100), pss(1.5, 90), pss(2.25, 400)], 0.0),  # not again and again
        ([pss(1.0, 300), pss(2.0, 200), pss(3.0, 100)], -100.0),
    ],
)
def test_a_warm_up_is_no_leak(samples: list[PssSample], slope: float) -> None:
    assert pss_slope(samples) == pytest.approx(slope, abs=0.05)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [pss(1.0, 100)],
        [pss(1.0, 100), pss(4.0, 900)],  # warming up, or a leak?
        [pss(1.0, 100), pss(1.2, 200), pss(1.4, 300)],  # too close
        [pss(1.0, 100, processes=2), pss(1.5, 200, processes=2), pss(2.25, 900, processes=5)],  # workers started
        [pss(1.0, 900, processes=5), pss(1.5, 950, processes=5), pss(2.25, 100, processes=1)],  # workers ended
    ],
)
def test_there_is_no_slope_without_three_comparable_readings(samples: list[PssSample]) -> None:
    assert pss_slope(samples) is None


def test_cpu_shares_are_told_apart() -> None:
    # GIVEN 2 s on 4 CPUs of which 2 cores are ours to count on; the tree took 3 s, the machine 5 s, the hypervisor 0.8 s
    host = (HostCpu(cpus=4, busy_s=10.0, steal_s=1.0), HostCpu(cpus=4, busy_s=15.0, steal_s=1.8))
    uses = [(0.0, use(1, 7.0)), (1.0, None), (2.0, use(1, 10.0))]
    # WHEN
    shares = cpu_shares(uses, host, elapsed_s=2.0, usable_cores=2)
    # THEN
    assert shares == pytest.approx((0.75, 0.25, 0.1))


def test_ticks_that_disagree_make_no_negative_foreign_load() -> None:
    host = (HostCpu(cpus=1, busy_s=0.0, steal_s=0.0), HostCpu(cpus=1, busy_s=0.99, steal_s=0.0))
    assert cpu_shares([(0.0, use(1, 0.0)), (1.0, use(1, 1.0))], host, elapsed_s=1.0, usable_cores=1)[1] == 0.0


def test_unknown_cpu_times_are_none() -> None:
    assert cpu_shares([(0.0, None)], (None, None), elapsed_s=1.0, usable_cores=1) == (None, None, None)


@pytest.mark.parametrize(
    ("rss_bytes", "pss_bytes", "alarms"),
    [
        (89, 1000, 0),  # RSS is an upper bound: no need to look closer
        (500, 80, 0),  # shared pages, counted once each
        (500, 95, 1),
        (91, None, 1),  # no PSS here: RSS must do
    ],
)
def test_the_guard_goes_by_pss_at_90_percent(rss_bytes: int, pss_bytes: int | None, alarms: int) -> None:
    raised: list[bool] = []
    guard = MemoryGuard(100, lambda: raised.append(True))
    guard.check(0.0, rss_bytes, lambda: pss_bytes)
    assert len(raised) == alarms


def test_the_guard_raises_one_alarm_only() -> None:
    raised: list[bool] = []
    guard = MemoryGuard(100, lambda: raised.append(True))
    for second in range(5):
        guard.check(float(second), 200, lambda: None)
    assert len(raised) == 1


def test_a_suspicion_is_checked_once_a_second_at_most() -> None:
    # GIVEN a tree whose shared pages make it look too large
    tree = FakeTree(rss_bytes=200, pss_bytes=50)
    guard = MemoryGuard(100, lambda: None)
    # WHEN it is looked at four times a second for five seconds
    for quarter in range(20):
        guard.check(quarter / 4, tree.rss, tree.pss_bytes)
    # THEN PSS was read once for each second
    assert tree.pss_reads == 5


def test_a_tree_over_its_budget_raises_the_alarm() -> None:
    # GIVEN a meter on a tree that is too large
    alarm = threading.Event()
    tree = FakeTree(rss_bytes=100 * MIB, pss_bytes=95 * MIB)
    meter = TreeMeter(tree, usable_cores=1, memory_budget_bytes=100 * MIB, on_memory_limit=alarm.set)
    # WHEN it runs THEN the alarm comes
    with meter:
        assert alarm.wait(20.0)


@pytest.mark.process
def test_a_real_tree_is_measured() -> None:
    # GIVEN a process that takes memory and burns CPU in a child
    script = """
import subprocess, sys
burn = '''
import time
held = b"x" * 50_000_000
print("up", flush=True)
while time.process_time() < 60: pass
'''
child = subprocess.Popen([sys.executable, "-c", burn])
sys.stdin.read()
child.kill()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    # WHEN it is metered for a moment
    with TreeMeter(process.pid, usable_cores=1) as meter:
        time.sleep(0.6)
    reading = meter.reading
    process.communicate()
    # THEN its child's memory and CPU are in the reading, and a GPU that nobody watches is not zero
    assert reading.memory is not None
    assert reading.memory.rss_bytes > 50_000_000
    assert reading.cpu_share is not None
    assert reading.cpu_share > 0.05
    assert (reading.gpu.util, reading.gpu.reason) == (None, "the step does not run on an NVIDIA GPU")


@pytest.mark.process
def test_a_tree_that_dies_during_the_burst_keeps_what_was_seen() -> None:
    # GIVEN a process that is killed while it is metered
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    # WHEN
    with TreeMeter(process.pid, usable_cores=1) as meter:
        process.kill()
        process.communicate()
    # THEN
    assert meter.reading.memory is not None
    assert meter.reading.memory.rss_bytes > 0


def test_pss_is_read_rarely() -> None:
    # GIVEN a tree and a clock that a test moves
    clock = FakeClock()
    tree = FakeTree(rss_bytes=1, pss_bytes=1)
    meter = TreeMeter(tree, usable_cores=1, clock=clock)
    # WHEN forty looks are made over ten seconds
    for _ in range(40):
        clock.advance(0.25)
        meter._look()
    # THEN PSS was read at 1, 1.5, 2.25, 3.5, 5.25 and 8 s
    assert tree.pss_reads == 6


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeGpus(has_driver=False), "nvmlInit: NVML Shared Library Not Found"),
        (FakeGpus([]), "NVML knows no cuda:0"),
    ],
)
def test_a_gpu_that_cannot_be_watched_has_a_reason(nvml: FakeGpus, reason: str) -> None:
    with TreeMeter(os.getpid(), usable_cores=1, gpus=Gpus(nvml, environ={})) as meter:
        pass
    assert (meter.reading.gpu.util, meter.reading.gpu.reason) == (None, reason)


def test_the_gpu_asked_for_is_watched() -> None:
    # GIVEN two GPUs, of which the second is full
    nvml = FakeGpus([FakeGpu(uuid="GPU-0", used_bytes=1), FakeGpu(uuid="GPU-1", used_bytes=9)])
    # WHEN cuda:1 is watched
    with TreeMeter(os.getpid(), usable_cores=1, gpus=Gpus(nvml, environ={}), cuda_index=1) as meter:
        pass
    # THEN its memory is read
    assert meter.reading.gpu.memory_bytes == 9


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the cheap way needs /proc")
def test_a_look_is_cheap() -> None:
    # GIVEN a meter on a small tree
    meter = TreeMeter(os.getpid(), usable_cores=1)
    meter._quick_look()
    # WHEN many looks are made
    began = time.process_time()
    for _ in range(50):
        meter._quick_look()
    spent_s = (time.process_time() - began) / 50
    # THEN one costs less than 2 % of its period even on a slow machine (0.1 % is usual)
    assert spent_s < 0.02 * 0.25
