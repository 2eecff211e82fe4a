"""A clock that moves only when told to."""

from __future__ import annotations


class FakeClock:
    """A monotonic clock that moves only when told to: pass it where `time.monotonic` would go."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on by `seconds`; returns the new time.

        Raises:
            ValueError: time would run backwards.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds} would turn a monotonic clock back; seconds=0 would work")
        self.now += seconds
        return self.now

    def sleep(self, seconds: float) -> None:
        """`time.sleep` on this clock."""
        self.advance(seconds)
