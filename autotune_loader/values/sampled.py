"""The histories of the batches of a training of any length, in bounded memory: rare ones, and a share of the common ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune_loader.values.trace import BatchTrace

LAST = 64
"""Batches whose times tell what is usual; the first ones, which start workers and fill caches, are all kept."""
USUAL = 0.9
"""What this share of the last batches does not exceed is usual: where workers deliver in waves, each n-th wait is long."""
LEAST = 0.1
"""Times below this share of a wait and a step together are too short to matter."""
RARE = 3.0
"""A batch is rare where its wait, service or step takes this many times the usual; more where more than half are rare."""
RUN = 32
"""Common batches are kept in runs of this many, in which a timeline has no holes."""


class Sampled:
    """Keeps some of the batches that it is given; `add` takes about a microsecond.

    Rare batches are kept: the first ones, and those whose wait, service or step takes several times the usual of the last
    ones. Of the common ones every k-th run is kept. Whenever the limit is reached, k doubles, and so does what is rare if
    rare batches alone take half of the room.

    Args:
        most: Most batches to keep; at least 256.
    """

    def __init__(self, most: int = 40_000) -> None:
        self.rows: dict[int, BatchTrace] = {}
        """What is kept, in order, by the number of the batch; the first has number 1."""
        self.count: int = 0
        """Batches that were given."""
        self._most, self._every, self._rare_times = most, 1, RARE
        self._times_of_rare: dict[int, float] = {}
        self._last: list[tuple[float, float, float]] = []
        self._usual: tuple[float, ...] = (0.0, 0.0, 0.0)  # seconds of wait, service and step
        self._limits: tuple[float, ...] = (-math.inf, 0.0, 0.0)  # a batch beyond one of these is rare: at first each is

    def add(self, row: BatchTrace) -> None:
        """Take a batch, in the order of delivery, and keep it or not."""
        self.count = number = self.count + 1
        times = row.received - row.requested, row.collate_end - row.fetch_start, row.step_end - row.received
        self._last.append(times)
        longest = self._limits
        if times[0] > longest[0] or times[1] > longest[1] or times[2] > longest[2]:
            is_first = number <= LAST
            ratios = [math.inf] if is_first else [own / usual for own, usual in zip(times, self._usual, strict=True)]
            self._times_of_rare[number] = max(ratios)
            self.rows[number] = row
        elif number // RUN % self._every == 0:
            self.rows[number] = row
        if len(self._last) == LAST:
            self._learn()
        if len(self.rows) >= self._most:
            self._thin()

    def _learn(self) -> None:
        wait_s, service_s, step_s = (sorted(each)[int(USUAL * LAST)] for each in zip(*self._last, strict=True))
        least_s = LEAST * (wait_s + step_s) + 1e-6
        self._usual = tuple(max(each, least_s) for each in (wait_s, service_s, step_s))
        self._limits = tuple(self._rare_times * each for each in self._usual)
        self._last.clear()

    def _thin(self) -> None:
        self._every *= 2
        while len(self._times_of_rare) > max(LAST, self._most // 2):
            self._rare_times *= 2
            rare = self._times_of_rare.items()
            self._times_of_rare = {number: times for number, times in rare if times > self._rare_times}
        kept = self._times_of_rare
        self.rows = {
            number: row for number, row in self.rows.items() if number in kept or number // RUN % self._every == 0
        }


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """What a trace shows of one loader; times are seconds of `time.monotonic()`."""

    name: str
    """The loader's, such as "train.py:12"."""
    rows: Mapping[int, BatchTrace]
    """Histories by the number of the batch, in order, as `Sampled.rows` has them; the time of missing numbers is marked."""
    intervals: Sequence[tuple[str, float, float]] = ()
    """Name, begin and end of epochs, evaluations and checkpoints; two of them overlap only where one lies in the other."""
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By the name of each, in order: seconds, and the value from then on."""
