"""A value looked at again and again on a background thread, and its time-weighted mean.

Deadlines are absolute: a look that takes long or a thread that wakes late does not shift those that follow, and looks
that were missed are skipped, not made up for.

    deadline     0      1      2      3      4
    look         xx     xx     xxxxxxxxxxx   xx         (3 is skipped)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Sampler(Generic[T]):
    """Calls `look` every `period_s` until it is stopped, and keeps what it returned with the time.

    The thread holds no lock while it looks, and appending is atomic, so a process may fork at any moment.

    Args:
        look: Called without arguments. If it raises, sampling ends and the exception is kept in `error`.
        period_s: Seconds between looks.
        clock: Monotonic seconds.
        wait: Waits for the seconds it is given, or less when told to stop, and says whether it was; for tests.
    """

    def __init__(
        self,
        look: Callable[[], T],
        *,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        if period_s <= 0:
            raise ValueError(f"period_s={period_s} is not above 0; period_s=0.25 would work")
        self.error: Exception | None = None
        self._look = look
        self._period_s = period_s
        self._clock = clock
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._series: list[tuple[float, T]] = []
        self._thread: threading.Thread | None = None

    @property
    def series(self) -> tuple[tuple[float, T], ...]:
        """When each look was done, in the clock's seconds, and what it saw."""
        return tuple(self._series)

    def start(self) -> None:
        """Begin, with a first look at once."""
        self._thread = threading.Thread(target=self.run, name="autotune-loader-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for a look under way. Safe to call twice, from the look itself, and without `start()`."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def run(self) -> None:
        """Look until stopped, on the calling thread."""
        started, turn = self._clock(), 0
        while not self._stopped.is_set():
            try:
                seen = self._look()
            except Exception as error:
                logger.warning("A meter stopped: %s", error, exc_info=True)
                self.error = error
                return
            now = self._clock()
            self._series.append((now, seen))
            turn = max(turn + 1, math.ceil((now - started) / self._period_s))
            if self._wait(started + turn * self._period_s - now):
                return


def time_weighted_mean(series: Sequence[tuple[float, float]], start: float) -> float | None:
    """Mean of (time, value) pairs, each of which speaks for the time since the one before it, the first since `start`.

    That is what a counter such as NVML's utilisation says: it looks back. None when no time has passed.
    """
    total = area = 0.0
    before = start
    for moment, value in series:
        span = max(0.0, moment - before)
        total, area, before = total + span, area + span * value, max(before, moment)
    return area / total if total > 0 else None
