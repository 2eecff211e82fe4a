"""What a loop waited for, by the histories of its batches.

worker      fetch_start ── fetch ── collate_end
thread                                            pin_start ── pin_end
loop             asked ── fetching ────────────│── transfer ── pinning ── transfer ──│ received
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

LATEST, EVERY = 256, 64
"""By so many batches it is known what is usual; it is looked at again after so many."""
SLOW, SLOW_S = 4.0, 0.05
"""A batch that takes its worker so many times the usual seconds, and so many, is slow."""


@dataclass(slots=True)
class Waits:
    """Sums over batches, without the first one of an epoch; some stand for others whose history is not known."""

    batches: int = 0
    waited_s: float = 0.0
    """Until they were there."""
    unready_s: float = 0.0
    """Of that, until the worker was ready for the first batch of its own."""
    pinning_s: float = 0.0
    """Of that, while a thread pinned the batch."""
    transfer_s: float = 0.0
    """Of that, after the batch was whole, and not while it was pinned."""
    slow_s: float = 0.0
    """Of that, beyond what is usual, where the batch was slow."""
    slow: int = 0
    """Slow batches."""
    slow_fetches_s: float = 0.0
    """What they took to make."""
    slow_cpu_s: float = 0.0
    """CPU of that."""
    fetched_s: float = 0.0
    """What workers, or the loop, took to make all of them."""
    cpu_s: float = 0.0
    """CPU of that."""
    pinned_s: float = 0.0
    """What a thread took to pin all of them."""
    usual_s: float = 0.0
    """The median of the latest batches."""
    _latest: deque[float] = field(default_factory=lambda: deque[float](maxlen=LATEST))
    _since: int = 0
    _early: list[tuple[float, float, float]] = field(default_factory=list)

    def add(
        self,
        made: float,
        whole: float,
        cpu_s: float,
        asked: float,
        received: float,
        *,
        is_early: bool = False,
        times: int = 1,
    ) -> None:
        """A batch that was begun and whole at these moments, as the loop has asked for it and received it.

        `is_early` says that it is one of so many batches of an epoch as there are workers, `times` how many it stands for.
        """
        if is_early and made > asked:
            self.unready_s += times * (min(made, received) - asked)
        service_s, waited_s = whole - made, received - asked
        self.batches += times
        self.waited_s += times * waited_s
        self.fetched_s += times * service_s
        if cpu_s >= 0.0:  # not where it is not known
            self.cpu_s += times * cpu_s
        handed_s = received - (whole if whole > asked else asked)
        self.transfer_s += times * handed_s if handed_s > 0 else 0.0
        self._latest.extend([service_s] * min(times, EVERY))
        fetching_s = max(0.0, min(whole, received) - max(made, asked))  # what the loop waited for while it was made
        if not self.usual_s:
            self._early.append((service_s, fetching_s, cpu_s))
        elif service_s > SLOW_S and service_s > SLOW * self.usual_s:
            self._add_slow(service_s, fetching_s, cpu_s)
        self._since += 1
        if self._since >= EVERY:
            self.settle()

    def add_pinned(self, start: float, end: float, asked: float, received: float, times: int = 1) -> None:
        """The same batch was pinned meanwhile."""
        self.pinned_s += times * (end - start)
        seconds = times * max(0.0, min(end, received) - max(start, asked))
        self.pinning_s += seconds
        self.transfer_s -= min(seconds, self.transfer_s)

    def settle(self) -> None:
        """See what is usual, and count early batches by it."""
        self._since = 0
        if not self._latest:
            return
        self.usual_s = max(1e-9, statistics.median(self._latest))
        for service_s, fetching_s, cpu_s in self._early:
            if service_s > SLOW_S and service_s > SLOW * self.usual_s:
                self._add_slow(service_s, fetching_s, cpu_s)
        self._early.clear()

    def _add_slow(self, service_s: float, fetching_s: float, cpu_s: float) -> None:
        self.slow += 1
        self.slow_fetches_s += service_s
        self.slow_s += min(fetching_s, service_s - self.usual_s)
        if cpu_s >= 0.0:
            self.slow_cpu_s += cpu_s
