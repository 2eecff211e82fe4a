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
from tests.support.simulation import Disturbed, Run

Reason = Literal["start", "change", "loss"]
NOISE_S = 1.0
"""The machine's noise lasts for about so long ..."""
NEIGHBOURS_S = 3.0
"""... and neighbours come and go this often."""


class SimulatedTraining:
    """Trains batch after batch, as AutoLoader does: a new pool fills its queues while the one before is emptied.

    The machine may be set to another one at any time.
    """

    def __init__(self, machine: SimulatedMachine, clock: FakeClock, config: LoaderConfig, *, seed: int = 0) -> None:
        self.traces, self.failures = LiveTraces(), dict[LoaderConfig, Failure]()
        self.config, self.awaits_proof, self.shape = config, False, None
        self.changes: list[tuple[float, LoaderConfig]] = []
        """When it was asked to change, and to what."""
        self._clock, self._rng, self._numbers = clock, random.Random(seed), itertools.count()
        self._noise_ends = self._neighbours_end = clock() + NOISE_S
        self._machine, self._slower, self._neighbours = machine, 1.0, 0.0
        self._is_open, self._change_begun = True, clock()
        self._start("start", 0, self.traces.end)

    @property
    def machine(self) -> SimulatedMachine:
        return self._machine

    @machine.setter
    def machine(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._run.disturb(self._disturbed())

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
        self.config, self._change_begun = asked, self._clock()
        self._start("loss", 0, self.traces.end)

    def train(self) -> BatchTrace:
        """One batch; the clock is at the end of its step afterwards."""
        self._pass_time()
        if self.config is not self._run.config and self._is_open:
            self._is_open, self._change_begun = False, self._clock()
            self._in_hand = self._run.handed_out - self._run.done
            self._mark = self.traces.end
        trace = next(self._batches, None)
        if trace is None:
            self._is_open = True
            self._start("change", self._in_hand, self._mark)
            trace = next(self._batches)
        self.traces.note(trace)
        self._clock.now = trace.step_end
        return trace

    def _pass_time(self) -> None:
        """Noise and neighbours come and go."""
        now, rng, machine = self._clock(), self._rng, self._machine
        if now >= self._noise_ends:
            self._noise_ends = now + rng.expovariate(1 / NOISE_S)
            self._slower = rng.lognormvariate(0.0, machine.noise_sd)
        if machine.neighbours and now >= self._neighbours_end:
            self._neighbours_end = now + rng.expovariate(1 / NEIGHBOURS_S)
            self._neighbours = machine.neighbours if rng.random() < machine.neighbours_share else 0.0
        self._run.disturb(self._disturbed())

    def _start(self, reason: Reason, in_hand: int, first: int) -> None:
        """Workers start, and take over from batch `first` on when what is in hand has been trained on."""
        config, machine, begun = self.config, self._machine, self._change_begun
        start_s = machine.start_s + config.num_workers * machine.worker_start_s if config.num_workers else 0.0
        self._run = Run(
            self._disturbed(),
            config,
            self._feed(),
            begun,
            is_running=not config.num_workers,
            pause_s=max(0.0, self._clock() - begun - start_s),
        )
        self._batches = self._run.batches()
        served, blocked_s = first + in_hand, start_s
        self.traces.changes.append(
            Change(batch=first, serves_from=served, config=config, reason=reason, begun=begun, blocked_s=blocked_s)
        )

    def _feed(self) -> Iterator[int]:
        while self._is_open:
            yield next(self._numbers)

    def _disturbed(self) -> Disturbed:
        return Disturbed(self._machine, self._slower, self._neighbours)
