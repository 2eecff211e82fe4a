"""A training run on a simulated machine whose workers change in its midst, and whose machine may change, too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from autotune_loader.live.traces import Change, LiveTraces
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.trace import BatchTrace
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import _Disturbed, _Events

Reason = Literal["start", "change", "loss"]
NOISE_S = 1.0
"""The machine's noise lasts for about so long ..."""
NEIGHBOURS_S = 3.0
"""... and neighbours come and go this often."""


class SimulatedTraining:
    """Trains batch after batch, as AutoLoader does: a new pool fills its queues while the one before is emptied.

    Args:
        machine: what is trained on; `machine` may be set to another one at any time.
        clock: moves on by what each batch takes.
        config: what it begins with.
        seed: of the machine's noise.
    """

    def __init__(self, machine: SimulatedMachine, clock: FakeClock, config: LoaderConfig, *, seed: int = 0) -> None:
        self.traces, self.failures = LiveTraces(), dict[LoaderConfig, Failure]()
        self.config, self.awaits_proof = config, False
        self.changes: list[tuple[float, LoaderConfig]] = []
        """When it was asked to change, and to what."""
        self._clock, self._rng, self._numbers = clock, random.Random(seed), itertools.count()
        self._noise_ends = self._neighbours_end = clock() + NOISE_S
        self._machine, self._slower, self._neighbours = machine, 1.0, 0.0
        self._running = config
        self._is_open = True
        self._run, self._batches = self._started(clock(), "start", 0)

    @property
    def machine(self) -> SimulatedMachine:
        return self._machine

    @machine.setter
    def machine(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._disturb()

    def may_run(self, config: LoaderConfig) -> bool:
        """Simulated workers make what anyone makes."""
        return True

    def change_to(self, config: LoaderConfig) -> None:
        """Another configuration from the next batch on; one that the machine fails with changes nothing."""
        failure = self._machine.fails(config) if self._machine.fails else None
        if failure is not None:
            self.failures[config.key()] = failure
            return
        self.config = config
        self.changes.append((self._clock(), config))

    def lose_workers(self, asked: LoaderConfig) -> None:
        """What runs fails with all it has in hand, and what was asked for takes its place."""
        message = f"{self.config}: a worker exited unexpectedly"
        self.failures[self.config.key()] = Failure(kind="user_exception", phase="batches", message=message)
        self.config = self._running = asked
        self._mark = self.traces.end
        self._run, self._batches = self._started(self._clock(), "loss", 0)

    def train(self) -> BatchTrace:
        """One batch; the clock is at the end of its step afterwards."""
        if self._clock() >= self._noise_ends:
            self._noise_ends = self._clock() + self._rng.expovariate(1 / NOISE_S)
            self._slower = self._rng.lognormvariate(0.0, self._machine.noise_sd)
            self._disturb()
        if self._machine.neighbours and self._clock() >= self._neighbours_end:
            self._neighbours_end = self._clock() + self._rng.expovariate(1 / NEIGHBOURS_S)
            are_there = self._rng.random() < self._machine.neighbours_share
            self._neighbours = self._machine.neighbours if are_there else 0.0
            self._disturb()
        if self.config is not self._running and self._is_open:
            self._is_open, self._change_begun = False, self._clock()
            self._in_hand = len(self._run.numbers) - self._run.done_count if self._running.num_workers else 0
            self._mark = self.traces.end
        trace = next(self._batches, None)
        if trace is None:
            self._running, self._is_open = self.config, True
            self._run, self._batches = self._started(self._change_begun, "change", self._in_hand)
            trace = next(self._batches)
        self.traces.note(trace)
        self._clock.now = trace.step_end
        return trace

    def _started(self, begun: float, reason: Reason, in_hand: int) -> tuple[_Events, Iterator[BatchTrace]]:
        config, machine = self._running, self._machine
        start_s = machine.start_s + config.num_workers * machine.worker_start_s if config.num_workers else 0.0
        run = _Events(
            _Disturbed(machine, self._slower, self._neighbours),
            config,
            self._feed(),
            begun,
            is_running=not config.num_workers,
            pause_s=max(0.0, self._clock() - begun - start_s),
        )
        first = self.traces.end if reason == "start" else self._mark
        change = Change(
            batch=first,
            serves_from=first + in_hand,
            config=config,
            reason=reason,
            begun=begun,
            blocked_s=start_s,
        )
        self.traces.changes.append(change)
        return run, run.batches()

    def _feed(self) -> Iterator[int]:
        while self._is_open:
            yield next(self._numbers)

    def _disturb(self) -> None:
        run = self._run
        run.disturbed = _Disturbed(self._machine, self._slower, self._neighbours)
        run.machine, run.step_s = self._machine, run.disturbed.step_seconds(self._running.consumer_threads)
