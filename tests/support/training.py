"""A simulated training whose loader a tuner changes: a queue of workers, a step, and a log as the real one has it."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from typing import Any

from autotune_loader.autoloader.tuner import Tuner
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import MAIN_PROCESS, LoaderConfig

SAMPLES = 8


@dataclass
class Training:
    """One job on one machine; time passes only in `run`."""

    fetch_s: float
    cpu: float  # Share of a fetch that computes
    step_s: float
    cores: int = 4
    hand_over_s: float = 0.0002
    start_s: float = 0.01
    noise: float = 0.02
    epoch_batches: int = 1_000_000
    seed: int = 0
    now: float = 100.0
    started: int = 0
    most: int = 0
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        self._random, self._ready, self._free = random.Random(self.seed), list[Any](), list[float]()
        self._loop: Any = None
        self._taken = 0.0  # When there was room for another batch last
        self._config, self._left = LoaderConfig(), 0

    @classmethod
    def drawn(cls, seed: int) -> Training:
        """A job of a kind that there is."""
        rng = random.Random(seed)
        return cls(
            fetch_s=10 ** rng.uniform(-3.5, -1.2),
            cpu=rng.choice([0.05, 0.5, 1.0]),
            step_s=10 ** rng.uniform(-4, -1.5),
            cores=rng.choice([2, 4, 8]),
            hand_over_s=10 ** rng.uniform(-4, -3),
            epoch_batches=rng.choice([20, 200, 100_000]),
            seed=seed,
        )

    def tuner(self, asked: LoaderConfig, **arguments: Any) -> Tuner:
        self._config = asked
        return Tuner(self.log, asked, **{"cores": self.cores, "epoch_batches": self.epoch_batches, **arguments})

    def rate(self, config: LoaderConfig) -> float:
        """Samples/s of a configuration that nobody changes."""
        other = replace(self, seed=self.seed + 1, now=100.0, log=Log())
        other._config = config
        return other.run(None, 20.0)

    def run(self, tuner: Tuner | None, seconds: float) -> float:
        """Train for so long; samples/s."""
        begun, before = self.now, self.log.totals.samples
        while self.now - begun < seconds:
            self._batch(tuner)
        return (self.log.totals.samples - before) / (self.now - begun)

    def until(self, tuner: Tuner, samples: float) -> float:
        """Train so many samples; seconds."""
        begun = self.now
        for _ in range(int(samples / SAMPLES)):
            self._batch(tuner)
        return self.now - begun

    def _batch(self, tuner: Tuner | None) -> None:
        if self._left == 0:
            self._next_epoch(tuner)
        self._loop.ask(self.now)
        if tuner is not None and self.now >= tuner.wake:
            tuner.look(self.now)
            if tuner.wanted != self._config:
                self._apply(tuner)
        asked = self.now
        if self._config.num_workers or self._ready:
            self._fill()
            end, begun, cpu, worker = heapq.heappop(self._ready)
            self.now = self._taken = max(self.now, end) + self.hand_over_s
            fetch = (worker, begun, end, end, cpu)
        else:
            took = self._noisy(self.fetch_s)
            self.now += took
            fetch = (MAIN_PROCESS, asked, self.now, self.now, took * self.cpu)
        self._loop.receive(self.now, SAMPLES, fetch)
        self.now += self._noisy(self.step_s)
        self._left -= 1
        if self._left == 0:
            self._loop.ask(self.now)
            self._loop.end(self.now)
            if tuner is not None:
                tuner.epoch(self.now - self._begun, self.epoch_batches)

    def _next_epoch(self, tuner: Tuner | None) -> None:
        self._begun = self.now
        self._loop, self._left = self.log.begin(self.now), self.epoch_batches
        self._ready, self._free, self._taken = [], [self.now] * self._config.num_workers, self.now
        if tuner is not None and tuner.wanted != self._config:
            self._apply(tuner)
        self._loop.started(self.now)

    def _apply(self, tuner: Tuner) -> None:
        workers = tuner.wanted.num_workers
        more = max(0, workers - self.most)
        self.now += more * self.start_s
        tuner.own_s += more * self.start_s
        if more:
            tuner.start_s = self.start_s
        self.started, self.most = self.started + more, max(self.most, workers)
        self._free = (self._free + [self.now] * workers)[:workers]
        self._config = tuner.wanted
        tuner.applied(self.now)

    def _fill(self) -> None:
        """Workers begin as long as there is room for what they make."""
        workers = self._config.num_workers
        room = workers * (self._config.prefetch_factor or 0)
        while len(self._ready) < min(room, self._left):
            worker = min(range(workers), key=lambda each: self._free[each])
            begun = max(self._free[worker], self._taken)
            # So many compute at once that all cores are taken: in a steady state the others wait meanwhile.
            slower = max(1.0, workers / self.cores - (1 - self.cpu) / self.cpu)
            end = begun + self._noisy(self.fetch_s * (1 - self.cpu + self.cpu * slower))
            self._free[worker] = end
            heapq.heappush(self._ready, (end, begun, self.fetch_s * self.cpu, worker))

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self.noise))
