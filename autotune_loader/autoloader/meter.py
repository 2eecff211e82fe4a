"""What a configuration reaches, measured in the log of a loop, without what the switch to it left behind.

switched ── batches in flight ── one of each worker ── the batches that count ── enough of them: seen
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

import numpy as np

from autotune_loader.pipeline.loop_log import Log, longest_s, measurement, own_rows
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.search.twin import LIGHT_VARIATION
from autotune_loader.values import BatchTrace, LoaderConfig, Measurement

BLOCK_S, BLOCK_BATCHES, MOST_BLOCKS = 0.25, 6, 10
"""The least that is measured of a configuration; so many times as long, pauses included, is enough of a few batches."""
SLOW_S, SLOW_BATCHES = 5.0, 2
"""So many batches are enough if they take so long."""
LATEST = 400
"""A measurement is of so many batches at most."""
HICCUP = 20.0
"""A wait of so many usual ones is nobody's cost, unless a worker has begun with it."""
LEAST_FALL, TOLERANCE = 0.01, 0.015
"""More workers are worth it if they are faster by the first share; fewer, if they are not slower by the second."""
MOST_STEPS, LONG_STEPS, LEAST_LONG_S = 0.9, 2.0, 0.25
"""A step of more than so many times what this share of all steps takes at most, and of more seconds, is not measured."""
LATEST_STEPS = 16
"""Measurements among which steps that waited for nobody are looked for."""


class Measure(NamedTuple):
    """Measure a configuration for so long."""

    config: LoaderConfig
    seconds: float = BLOCK_S
    batches: int = BLOCK_BATCHES


class Reached(NamedTuple):
    """What was measured of a configuration."""

    config: LoaderConfig
    of: Measurement
    speed: float
    """Samples/s if steps waited for nobody: other ranks, or a device, wait for this loop's data as it does for theirs."""
    seconds: float
    batches: int
    """Since it ran, its first batches included."""
    starts_s: float
    """What the start of an epoch's workers takes, for each of its batches."""
    service_s: Floats
    """Of each batch."""
    at_s: float
    """Seconds of training until then."""

    @property
    def observation(self) -> Observation:
        """What it tells the twin. What varies more than lightly, and steps at all, batches that are made ahead make up for."""
        of, service_s = self.of, self.service_s
        spread = float(service_s.std()) / max(of.service_s, 1e-12)
        service_s = of.service_s + (service_s - of.service_s) * min(1.0, LIGHT_VARIATION / max(spread, 1e-12))
        batches_per_s = of.samples_per_s.value / of.batch_size
        return Observation(
            num_workers=self.config.num_workers,
            service_s=np.maximum(service_s, 1e-9),
            cpu_s=np.array([of.service_cpu_s]),
            receive_s=np.array([max(of.receive_s, 0.0)]),
            step_s=np.array([of.step_s]),
            batch_size=of.batch_size,
            batches_per_s=batches_per_s,
            at_work=min(float(self.config.num_workers), batches_per_s * of.service_s),
        )

    @property
    def rate(self) -> float:
        """Samples/s, with the starts of epochs."""
        return self.of.samples_per_s.value * (1 - self.starts_s / self.batch_s)

    @property
    def batch_s(self) -> float:
        """Seconds a batch, with the starts of epochs."""
        return self.of.window_s / self.of.samples_per_s.count + self.starts_s

    def is_near(self, other: Reached) -> bool:
        """Whether it may be as fast."""
        return self.rate > (1 - 2 * TOLERANCE) * other.rate


class Meter:
    """Measures one configuration at a time.

    Args:
        starts_s: What the start of an epoch's workers takes, for each of its batches.

    Attributes:
        open_s: How much longer the first fetch of a process takes.
        has_run: The largest number of workers so far.
    """

    def __init__(self, log: Log, config: LoaderConfig, starts_s: Callable[[LoaderConfig], float]) -> None:
        self._log, self._running, self._starts_s = log, config, starts_s
        self.open_s, self.has_run, self._has_measured = 0.0, 0, False
        self._steps = deque[float](maxlen=LATEST_STEPS)
        self._first = 0
        self.begin(Measure(config))

    @property
    def step_s(self) -> float:
        """What a step takes that waits for nobody: the shortest mean of the latest measurements."""
        return min(self._steps, default=0.0)

    def begin(self, request: Measure, now: float = math.inf) -> None:
        """Measure this from now on; if it is another configuration, as soon as it runs."""
        self.request = request
        self._since, self._since_s, self._since_at = self._log.end, self._log.totals.active_s, now
        if self._running == request.config:
            self._first = self._since

    def switched(self, config: LoaderConfig, now: float, in_flight: int = 0) -> None:
        """It runs. So many batches that were begun before do not count, nor does one of each worker."""
        if self._running != config:
            self._running, self._first = config, self._log.end + self._log.behind
            self._since = self._first + in_flight + max(1, config.num_workers)
            self._since_s, self._since_at = self._log.totals.active_s, now

    def seen(self, now: float) -> Reached | None:
        """What was asked for, once there is enough of it."""
        request = self.request
        log, config = self._log, request.config
        count, seconds = log.end - self._since, log.totals.active_s - self._since_s
        workers = max(1, config.num_workers)
        least = workers * math.ceil((SLOW_BATCHES if seconds > SLOW_S else request.batches) / workers)
        if self._running != config or count < least or seconds < request.seconds:
            return None
        rows = log.since(max(self._since, log.end - LATEST) - 1)
        # The first batch of an epoch waits for its workers to start, which is added for all batches alike.
        rows = [row for before, row in pairwise(rows) if row.requested == before.step_end]
        rows = rows[len(rows) % workers :]  # workers often deliver at the same time
        rows = own_rows(rows, _longest_s(log.steps), config.num_workers)
        of = measurement(rows, config.num_workers)
        if of is None or of.samples_per_s.count < max(min(workers, count // 2), SLOW_BATCHES):
            return None
        is_long = now - self._since_at > MOST_BLOCKS * request.seconds or count >= LATEST
        if of.window_s < min(request.seconds, BLOCK_S) and not is_long:
            return None
        own = self._own(log.since(max(self._first, log.end - 2 * LATEST)), of)
        seconds = sum(row.wait_s + min(row.step_s, of.step_s) for row in own)
        return self._measured(of, seconds, len(own), rows)

    def _measured(self, of: Measurement, seconds: float, batches: int, rows: list[BatchTrace]) -> Reached:
        self._steps.append(of.step_s)
        self._has_measured = True
        step_s, workers = self.step_s + of.receive_s, self.request.config.num_workers
        fetch_s = of.service_s / workers if workers else of.service_s + step_s
        starts_s = self._starts_s(self.request.config)
        speed = of.batch_size / max(fetch_s + starts_s, step_s + starts_s, 1e-9)
        service_s = np.array([row.service_s for row in rows])
        at_s = self._log.totals.active_s
        return Reached(self.request.config, of, speed, seconds, batches, starts_s, service_s, at_s)

    def _own(self, rows: list[BatchTrace], of: Measurement) -> list[BatchTrace]:
        """Those since the configuration runs that cost what it costs; learns what the first fetch of a worker takes."""
        workers, firsts = self._running.num_workers, dict[int, BatchTrace]()
        if self.has_run < workers or not self._has_measured:
            begin = self._since - self._first
            for row in rows[max(0, begin - workers) : begin + workers + 1]:
                if row.worker >= self.has_run or not workers:
                    firsts.setdefault(row.worker, row)
            if firsts:
                self.open_s = max(0.0, median_low([row.service_s for row in firsts.values()]) - 2 * of.service_s)
            self.has_run = max(self.has_run, workers)
        limit_s = HICCUP * max(of.window_s / of.samples_per_s.count, of.service_s, BLOCK_S / 10)
        return [row for row in rows[-LATEST:] if row.wait_s <= limit_s or row is firsts.get(row.worker)]


def measured(rows: Sequence[BatchTrace]) -> Measurement | None:
    """What these batches of a configuration say, pauses and what lay ready after them apart; None of none."""
    return measurement(own_rows(rows, longest_s([row.step_s for row in rows]))) if rows else None


def _longest_s(steps: Sequence[float]) -> float:
    """Steps that take longer say nothing of a few batches: a checkpoint among them is none of a configuration's."""
    ordered = sorted(steps)
    return min(longest_s(ordered), max(LEAST_LONG_S, LONG_STEPS * ordered[int(MOST_STEPS * (len(ordered) - 1))]))
