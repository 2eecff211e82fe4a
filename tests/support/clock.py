from __future__ import annotations


class FakeClock:
    """A monotonic clock that moves only when told to: pass it where `time.monotonic` would go."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on; returns the new time. Also `time.sleep` on this clock."""
        assert seconds >= 0, seconds
        self.now += seconds
        return self.now

    sleep = advance
