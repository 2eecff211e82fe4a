"""A device that works behind the host, without a device: it does in order what it was given, on a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from autotune_loader.pipeline.prefetch import move
from autotune_loader.values.trace import MAIN_PROCESS
from tests.support import FakeClock


class FakeTimeline:
    """A `Timeline` whose marks are the moments at which the device will have done what it was given so far.

    Args:
        clock: of the host.
        sleep: how the host lets time pass; moves a fake clock.
        copy_s: seconds of a copy on the side lane.
        malloc_s: seconds that the first work takes longer once memory was given back.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        copy_s: float = 0.0,
        malloc_s: float = 0.0,
    ) -> None:
        self.clock, self.sleep, self.copy_s, self.malloc_s = clock, sleep, copy_s, malloc_s
        self.has_memory = self.is_cold = False
        self.busy_until = 0.0
        self.events: list[str] = []
        self.peak = 0

    def launch(self, seconds: float) -> None:
        """Give the device so much work."""
        if not self.has_memory:
            seconds, self.has_memory = seconds + self.malloc_s, True
        self.busy_until = max(self.busy_until, self.clock()) + seconds

    def now(self) -> float:
        return self.clock()

    def open(self) -> None:
        self.events.append("open")
        self.peak = 0

    def mark(self) -> float:
        return max(self.busy_until, self.clock())

    def util(self, start: float, end: float) -> None:
        """No NVML knows it."""

    def passed(self, mark: float) -> float | None:
        return mark if mark <= self.clock() else None

    def wait(self, mark: float) -> None:
        self.sleep(max(0.0, mark - self.clock()))

    def synchronize(self) -> None:
        self.events.append("synchronize")
        self.sleep(max(0.0, self.busy_until - self.clock()))

    def make_lane(self) -> FakeLane:
        return FakeLane(self)

    def peak_bytes(self) -> int | None:
        return self.peak

    def release(self) -> None:
        self.events.append("release")
        self.has_memory, self.is_cold = False, True


class FakeLane:
    """A lane of its own beside the device's work."""

    def __init__(self, timeline: FakeTimeline) -> None:
        self.timeline = timeline
        self.busy_until = 0.0
        self.copies: list[tuple[float, float]] = []

    def open(self) -> None:
        self.timeline.events.append("lane")

    def send(self, batch: Any) -> tuple[Any, float]:
        begin = max(self.busy_until, self.timeline.clock())
        self.busy_until = begin + self.timeline.copy_s
        self.copies.append((begin, self.busy_until))
        return move(batch, "cpu"), self.busy_until

    def receive(self, sent: tuple[Any, float]) -> Any:
        batch, there = sent
        self.timeline.busy_until = max(self.timeline.busy_until, there)
        return batch


class FakeStep:
    """A training step on a `FakeTimeline`: the host spends `host_s` on handing it over, the device `step_s` on doing it."""

    def __init__(self, timeline: FakeTimeline, *, step_s: float, copy_s: float = 0.0, host_s: float = 0.0) -> None:
        self.timeline, self.step_s, self.copy_s, self.host_s = timeline, step_s, copy_s, host_s

    def move(self, batch: Any) -> Any:
        self.timeline.launch(self.copy_s)
        return batch

    def train(self, batch: Any) -> None:
        self.timeline.launch(self.step_s)
        self.timeline.sleep(self.host_s)


def made_in_time(clock: FakeClock, fetch_s: float, samples: int = 4) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Batches of one worker that makes one every `fetch_s`, whatever the loop does, with their records."""
    whole = clock()
    while True:
        begun, whole = whole, whole + fetch_s
        clock.advance(max(0.0, whole - clock()))
        yield "batch", (0, begun, whole, whole, fetch_s, samples)


def made_here(clock: FakeClock, fetch_s: float, samples: int = 4) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Batches that the training loop's own process makes when it asks for them, with their records."""
    while True:
        begun = clock()
        whole = clock.advance(fetch_s)
        yield "batch", (MAIN_PROCESS, begun, whole, whole, fetch_s, samples)
