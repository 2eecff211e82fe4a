"""An asynchronous accelerator on a test's clock: the host launches work and goes on beside it."""

from __future__ import annotations

from typing import Any

from tests.support.simulation import FakeClock


class Device:
    """Does what it is given in order. The test moves `now`, the clock of the device and the host.

    It is a module as torch has them, too (`Event`, `current_stream`), and gives fences.
    """

    def __init__(self, now: FakeClock | None = None) -> None:
        self.now = FakeClock() if now is None else now
        self.free_at = 0.0
        """When it will have done all that it was given."""
        self.is_lost = False
        """Whether asking it raises, as after a kernel that failed."""
        self.clock_speed = 1.0
        """Its own seconds between two events in one of the host's."""

    def launch(self, seconds: float) -> None:
        """Give it so much work."""
        self.free_at = self.mark() + seconds

    def mark(self) -> float:
        """A mark behind all that it was given so far: the moment at which it will pass it."""
        return max(self.free_at, self.now())

    def passed(self, mark: float) -> float | None:
        """When it passed a mark; None while it has not."""
        if self.is_lost:
            raise RuntimeError("device-side assert triggered")
        return mark if mark <= self.now() else None

    def wait(self, mark: float) -> None:
        """Have the host wait for a mark."""
        self.now.sleep(max(0.0, mark - self.now()))

    def fence(self) -> Event:
        """An event behind all that it was given so far."""
        return Event(self, self.mark())

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802 - as torch.cuda has it
        return Event(self)

    def current_stream(self, index: Any = None) -> Device:
        return self


class Event:
    """A mark as torch has them, and as a fence of the driver."""

    def __init__(self, device: Device, at: float = 0.0) -> None:
        self.device, self.at = device, at

    def record(self, stream: Device) -> None:
        self.at = stream.mark()

    def query(self) -> bool:
        return self.device.passed(self.at) is not None

    is_passed = query

    def wait(self) -> None:
        self.device.wait(self.at)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * self.device.clock_speed * (end.at - self.at)
