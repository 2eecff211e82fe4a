"""Turns on a machine that others use too: measure for a while with the machine for oneself, then let others in."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

LONGEST_TURN_S = 205.0
PAUSE_S = 4.0


class QuietTurns:
    """Holds an exclusive lock on a file while measuring, and lets go of it now and then.

    Args:
        path: the lock that everyone on the machine honours; None to measure without one.
        longest_s: seconds after which the lock is given up for a moment.
    """

    def __init__(self, path: Path | None, longest_s: float = LONGEST_TURN_S) -> None:
        self._path, self._longest_s = path, longest_s
        self.held_s = 0.0
        """Seconds in which the machine was ours."""
        self._since = 0.0

    @contextlib.contextmanager
    def turns(self) -> Iterator[QuietTurns]:
        """Take the lock, and give it back at the end."""
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(self._path.open("a")) if self._path else None
            self._take()
            try:
                yield self
            finally:
                self._give()

    def next(self) -> None:
        """Call between measurements: lets others in when the turn has been long enough."""
        if time.monotonic() - self._since > self._longest_s:
            self._give()
            time.sleep(PAUSE_S)
            self._take()

    def _take(self) -> None:
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._since = time.monotonic()

    def _give(self) -> None:
        self.held_s += time.monotonic() - self._since
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_UN)
