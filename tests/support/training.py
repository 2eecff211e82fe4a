"""A simulated training whose loader a tuner changes: a queue of workers, a step, and a log as the real one has it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune_loader.autoloader.tuner import Tuner
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import MAIN_PROCESS, LoaderConfig

SAMPLES = 8
BEGUN = 100.0
"""When the clock begins."""
NEIGHBOUR_S, NEIGHBOUR_EVERY_S = 20.0, 70.0
"""How long a neighbour takes cores, and how often."""
DRIFT_S = 600.0


@dataclass
class Training:
    """One job on one machine; time passes only in `run`."""

    fetch_s: float
    cpu: float  # Share of a fetch that computes
    step_s: float
    cores: int = 4
    transfer_s: float = 0.0002
    start_s: float = 0.01
    noise: float = 0.02
    epoch_batches: int = 1_000_000
    seed: int = 0
    open_s: float = 0.0  # How much longer the first fetch of each process takes
    evaluate_every: int = 0  # Steps; an evaluation takes
    evaluate_s: float = 20.0
    hiccup_every_s: float = 0.0  # One fetch takes longer by
    hiccup_s: float = 12.0
    sync_every: int = 0  # Steps; the device is asynchronous, and a step is launched in
    launch_s: float = 0.001
    drift: float = 1.0  # Fetches take so many times as long after ten minutes
    neighbour: float = 1.0  # Fetches take so many times as long while there is one
    now: float = BEGUN
    samples: int = 0
    started: int = 0
    most: int = 0
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        self._random, self._queue, self._free = random.Random(self.seed), deque[Any](), list[float]()
        self._loop: Any = None
        self._taken = self._device = 0.0  # When there was room for another batch last; when the device has done all
        self._config, self._left, self._steps, self._turn = LoaderConfig(), 0, 0, 0
        self._opened, self._hiccup_at = set[int](), BEGUN + 0.6 * self.hiccup_every_s

    @classmethod
    def drawn(cls, seed: int, **more: Any) -> Training:
        """A job of a kind that there is."""
        rng = random.Random(seed)
        drawn: dict[str, Any] = {
            "fetch_s": 10 ** rng.uniform(-3.5, -1.2),
            "cpu": rng.choice([0.05, 0.5, 1.0]),
            "step_s": 10 ** rng.uniform(-4, -1.5),
            "cores": rng.choice([2, 4, 8]),
            "transfer_s": 10 ** rng.uniform(-4, -3),
            "epoch_batches": rng.choice([20, 200, 100_000]),
        }
        return cls(seed=seed, **{**drawn, **more})

    def tuner(self, asked: LoaderConfig, **arguments: Any) -> Tuner:
        self._config = asked
        return Tuner(self.log, asked, **{"cores": self.cores, "epoch_batches": self.epoch_batches, **arguments})

    def fixed(self, config: LoaderConfig) -> Training:
        """The same job, begun anew, with a configuration that nobody changes."""
        other = replace(self, seed=self.seed + 1, now=BEGUN, samples=0, started=0, most=0, log=Log())
        other._config = config
        return other

    def rate(self, config: LoaderConfig, seconds: float = 20.0) -> float:
        """Samples/s of a configuration that nobody changes."""
        return self.fixed(config).run(None, seconds)

    def run(self, tuner: Tuner | None, seconds: float) -> float:
        """Train for so long; samples/s."""
        return together([self], [tuner], seconds)

    def until(self, tuner: Tuner, samples: float) -> float:
        """Train so many samples; seconds."""
        begun = self.now
        for _ in range(int(samples / SAMPLES)):
            self.batch(tuner)
        return self.now - begun

    def batch(self, tuner: Tuner | None) -> None:
        if self._left == 0:
            self._next_epoch(tuner)
        if tuner is not None:
            self._loop.ask(self._passed)
            if self.now >= tuner.wake:
                tuner.look(self.now)
                if tuner.wanted != self._config:
                    self._apply(tuner)
        asked = self.now
        if self._config.num_workers or self._queue:
            self._fill()
            end, begun, cpu, worker = self._queue.popleft()
            self.now = self._taken = max(self.now, end) + self.transfer_s
            fetch = (worker, begun, end, end, cpu)
        else:
            took = self._fetch(self.now, MAIN_PROCESS, 1.0)
            self.now += took
            fetch = (MAIN_PROCESS, asked, self.now, self.now, took * self.cpu)
        self.samples += SAMPLES
        if tuner is not None:
            self._loop.receive(self._passed, SAMPLES, fetch)
        self._step()
        self._left -= 1
        if self._left == 0 and tuner is not None:
            self._loop.ask(self._passed)
            self._loop.end(self._passed)
            tuner.epoch(self.now - self._begun, self.epoch_batches)

    @property
    def _passed(self) -> float:
        """When the device has done what it was given by now."""
        return max(self.now, self._device)

    def _step(self) -> None:
        step_s = self._noisy(self.step_s)
        self._steps += 1
        if self.sync_every:
            self._device = max(self._device, self.now) + step_s
            self.now += self.launch_s
            if self._steps % self.sync_every == 0:
                self.now = max(self.now, self._device)
        else:
            self.now += step_s
        if self.evaluate_every and self._steps % self.evaluate_every == 0:
            self.now += self.evaluate_s

    def _next_epoch(self, tuner: Tuner | None) -> None:
        self._begun = self.now
        self._loop, self._left = self.log.begin(self.now), self.epoch_batches
        self._queue.clear()
        self._free, self._taken = [self.now] * self._config.num_workers, self.now
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
        self._free += [self.now] * (workers - len(self._free))
        self._config, self._turn = tuner.wanted, 0
        tuner.applied(self.now, len(self._queue))

    def _fill(self) -> None:
        """Batches are given to the workers in turns as long as there is room for what they make."""
        workers = self._config.num_workers
        room = workers * (self._config.prefetch_factor or 0)
        # So many compute at once that all cores are taken: in a steady state the others wait meanwhile.
        slower = max(1.0, workers / self.cores - (1 - self.cpu) / self.cpu)
        while len(self._queue) < min(room, self._left):
            worker, self._turn = self._turn % workers, self._turn + 1
            begun = max(self._free[worker], self._taken)
            end = self._free[worker] = begun + self._fetch(begun, worker, slower)
            self._queue.append((end, begun, self.fetch_s * self.cpu, worker))

    def _fetch(self, now: float, worker: int, slower: float) -> float:
        seconds = self._noisy(self.fetch_s * (1 - self.cpu + self.cpu * slower))
        if self.drift != 1.0:
            seconds *= self.drift ** ((now - BEGUN) / DRIFT_S)
        if self.neighbour != 1.0 and (now + 7 * self.seed) % NEIGHBOUR_EVERY_S < NEIGHBOUR_S:
            seconds *= self.neighbour
        if self.open_s and worker not in self._opened:
            self._opened.add(worker)
            seconds += self.open_s
        if self.hiccup_every_s and now >= self._hiccup_at:
            self._hiccup_at += self.hiccup_every_s
            seconds += self.hiccup_s
        return seconds

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self.noise))


def together(ranks: Sequence[Training], tuners: Sequence[Tuner | None], seconds: float) -> float:
    """Train for so long with steps that end together, as ranks do that reduce their gradients; samples/s of each."""
    first = ranks[0]
    begun, before = first.now, first.samples
    while first.now - begun < seconds:
        for rank, tuner in zip(ranks, tuners, strict=True):
            rank.batch(tuner)
        now = max(rank.now for rank in ranks)
        for rank in ranks:
            rank.now = now
    return (first.samples - before) / (first.now - begun)
