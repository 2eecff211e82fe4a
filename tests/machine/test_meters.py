"""What a burst takes in its window, as its own process reads it; the alarm for its memory."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from autotune_loader.machine import memory_guard, window
from autotune_loader.machine.host import HostCpu
from autotune_loader.machine.memory_guard import MemoryGuard
from autotune_loader.machine.processes import TreeUse
from autotune_loader.machine.window import Window, of_cores
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval


@pytest.mark.parametrize(
    ("rss_bytes", "pss_bytes", "alarms"),
    [
        (89, 1000, 0),  # RSS is an upper bound: no need to look closer
        (500, 80, 0),  # shared pages, counted once each
        (500, 95, 1),
        (91, None, 1),  # no PSS here: RSS must do
    ],
)
@pytest.mark.process
def test_the_alarm_goes_by_pss_at_90_percent_and_comes_once(
    rss_bytes: int, pss_bytes: int | None, alarms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a tree that is as large as a test says, looked at every 5 ms
    looks, raised = list[Any](), list[bool]()
    use = TreeUse(processes=3, cpu_s=1.0, rss_bytes=rss_bytes)
    monkeypatch.setattr(memory_guard, "PERIOD_S", 0.005)
    monkeypatch.setattr(memory_guard, "SUSPICION_S", 0.0)
    monkeypatch.setattr(memory_guard, "tree_use", lambda members: looks.append(members) or use)
    monkeypatch.setattr(memory_guard, "tree_pss", lambda _members: pss_bytes)
    # WHEN it may have 100 bytes
    with MemoryGuard(os.getpid(), 100, lambda: raised.append(True)):
        while len(looks) < 5 and not raised:
            time.sleep(0.005)
    assert len(raised) == alarms


SECONDS = dict.fromkeys(("window_s", "first_batch_s", "service_s", "service_cpu_s", "receive_s", "step_s"), 0.0)
RATE = Interval(value=1.0, low=1.0, high=1.0, count=1)
MEASURED = Measurement(samples_per_s=RATE, samples=1, batch_size=0.0, wait_share=0.0, **SECONDS)  # type: ignore[arg-type]


def looking(monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, float | None, HostCpu | None]) -> None:
    """The machine at several moments: seconds, CPU seconds of the tree, and those of the host."""
    moments, trees, hosts = (iter(column) for column in zip(*looks, strict=True))
    uses = (None if cpu_s is None else TreeUse(processes=1, cpu_s=cpu_s, rss_bytes=5) for cpu_s in trees)
    monkeypatch.setattr(window, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(window, "tree_use", lambda _members: next(uses))
    monkeypatch.setattr(window, "host_cpu", lambda _cpus: next(hosts))


def test_cpu_shares_are_those_of_the_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN 6 s of start-up, then 2 s on 4 CPUs: the tree takes 3 s, the machine 5 s
    looking(
        monkeypatch,
        (0.0, 0.0, HostCpu(cpus=4, busy_s=0.0)),
        (6.0, 7.0, HostCpu(cpus=4, busy_s=10.0)),
        (8.0, 10.0, HostCpu(cpus=4, busy_s=15.0)),
    )
    watched = Window()
    watched.open()
    # WHEN it is closed THEN the tree has had 1.5 cores, and a quarter of the CPUs was others' work
    found = watched.closed(MEASURED)
    assert (found.cpu_share, found.foreign_cpu_share) == pytest.approx((1.5, 0.25))
    # THEN the parent, which knows what may be used, makes it a share of that
    assert of_cores(found, 2).cpu_share == pytest.approx(0.75)


def test_what_the_system_does_not_tell_is_none_and_ticks_make_no_negative_load(monkeypatch: pytest.MonkeyPatch) -> None:
    looking(monkeypatch, (0.0, None, None), (1.0, None, None))
    assert Window().closed(MEASURED) == MEASURED
    before, after = (HostCpu(cpus=1, busy_s=busy_s) for busy_s in (0.0, 0.99))
    looking(monkeypatch, (0.0, 0.0, before), (1.0, 1.0, after))
    assert Window().closed(MEASURED).foreign_cpu_share == 0.0
