"""A probe that trains on a simulated machine: workers, cores and queues, event by event, on a fake clock."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune_loader.pipeline.throughput import is_enough, summarise
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BurstPlan, Failure, Measurement, MemoryUse
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from tests.support.clock import FakeClock
from tests.support.machine import BASE_BYTES, SPIKE_FACTOR, SimulatedMachine


class SimulatedProbe:
    """A `Probe` that trains on a `SimulatedMachine`: workers, cores and queues are simulated event by event.

    Runnable processes share the cores equally, so stretching by contention emerges from the events; nothing here uses
    the twin's formulas. `truth` tells what no burst can: the rate without noise.
    """

    def __init__(
        self, machine: SimulatedMachine, clock: FakeClock, *, seed: int = 0, epoch_batches: int | None = None
    ) -> None:
        """A probe of a dataset of `epoch_batches` batches, or, where that is None, of one that never ends."""
        self.machine, self.epoch_batches = machine, epoch_batches
        self.bursts: list[LoaderConfig] = []
        """Every configuration that was asked for, in order."""
        self._clock, self._rng = clock, random.Random(seed)
        self._truths: dict[LoaderConfig, float] = {}

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment of simulated time, by which the clock moves on."""
        self.bursts.append(config)
        failure = self.machine.fails(config) if self.machine.fails else None
        if failure:
            self._clock.advance(self.machine.start_s)
            return failure
        disturbed, begun = self._disturbed(), self._clock()
        next_check, traces = begun, list[BatchTrace]()
        for trace in Run(disturbed, config, self._order(plan.seed), begun, pause_s=plan.prefill_s).batches():
            traces.append(trace)
            now = trace.step_end
            if now - begun > plan.deadline_s:
                self._clock.advance(plan.deadline_s)
                return Failure(kind="deadline", phase="batches", message="the simulated burst took too long")
            if now >= next_check and len(traces) > 1:
                next_check = now + 0.05
                if is_enough(traces, plan, workers=config.num_workers, now=now):
                    break
        self._clock.advance(traces[-1].step_end - begun)
        return self._measurement(config, traces, begun, disturbed)

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        """Step on one batch again and again."""
        disturbed = self._disturbed()
        begun = now = self._clock()
        traces: list[BatchTrace] = []
        while now - begun < plan.min_s or len(traces) < 3:
            end = now + disturbed.step_seconds / disturbed.step_speed
            traces.append(Batch(0, MAIN_PROCESS, 0.0, now, now, now, now).trace(end, self.machine.batch_size))
            now = end
        self._clock.advance(now - begun)
        return self._measurement(LoaderConfig(), traces, begun, disturbed)

    def truth(self, config: LoaderConfig, *, batches: int = 2000, warm: int | None = None) -> float:
        """Samples per second that `config` sustains in the long run, without noise, drift, spikes and neighbours.

        Args:
            config: the configuration.
            batches: how many are timed, both ends averaged over a round of the workers, who deliver in waves.
            warm: how many go before; enough to fill every queue when None. The same for all configurations makes them
                read the same batches.
        """
        if config not in self._truths:
            if warm is None:
                warm = 2 * config.num_workers * ((config.prefetch_factor or 0) + 1) + 1
            run = Run(Disturbed(self.machine, 1.0), config, self._order(0), 0.0)
            ends = [trace.step_end for trace in itertools.islice(run.batches(), warm + batches)]
            wave = min(max(config.num_workers, 1), batches // 2)
            begun, ended = sum(ends[warm : warm + wave]) / wave, sum(ends[-wave:]) / wave
            self._truths[config] = self.machine.batch_size * (batches - wave) / (ended - begun)
        return self._truths[config]

    def _order(self, seed: int) -> Iterator[int]:
        """Numbers of the batches that a run reads: ever new ones, or all of the dataset again and again, shuffled."""
        if self.epoch_batches is None:
            return itertools.count(seed * 1_000_003)
        rng, dataset = random.Random(seed), range(self.epoch_batches)
        return itertools.chain.from_iterable(rng.sample(dataset, len(dataset)) for _ in itertools.count())

    def _disturbed(self) -> Disturbed:
        machine = self.machine
        slower = math.exp(self._rng.gauss(0.0, machine.noise_sd))
        slower *= 1.0 + machine.drift_per_hour * self._clock() / 3600.0
        slower *= SPIKE_FACTOR if self._rng.random() < machine.spike_share else 1.0
        are_there = machine.neighbours and self._rng.random() < machine.neighbours_share
        return Disturbed(machine, slower, (machine.neighbours or 0.0) if are_there else 0.0)

    def _measurement(
        self, config: LoaderConfig, traces: list[BatchTrace], begun: float, disturbed: Disturbed
    ) -> Measurement:
        own, foreign = disturbed.cpu_shares(traces)
        worker_bytes = self.machine.worker_bytes + (config.prefetch_factor or 0) * self.machine.batch_bytes
        return replace(
            summarise(traces, workers=config.num_workers, started=begun),
            cpu_share=own,
            foreign_cpu_share=foreign,
            batch_bytes=self.machine.batch_bytes,
            memory=MemoryUse(rss_bytes=BASE_BYTES + config.num_workers * worker_bytes),
            traces=tuple(traces),
        )


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A machine during one burst, in which everything takes `slower` times as long."""

    machine: SimulatedMachine
    slower: float
    neighbours: float = 0.0
    """Cores that others want."""

    @property
    def step_cores(self) -> float:
        return min(self.machine.step_cores, self.machine.cores)

    @property
    def step_speed(self) -> float:
        """Of its own speed, what a step gets beside neighbours."""
        demand = self.step_cores + self.neighbours
        return min(1.0, self.machine.cores / demand) if self.step_cores else 1.0

    @property
    def step_seconds(self) -> float:
        return self.machine.step_s * self.slower

    def cpu_shares(self, traces: Sequence[BatchTrace]) -> tuple[float | None, float | None]:
        """What our processes and others took of the cores; None where the machine has no meter."""
        if self.machine.neighbours is None:
            return None, None
        cores_s = self.machine.cores * (traces[-1].step_end - traces[0].requested)
        stepped_s = len(traces) * self.step_seconds * self.step_cores
        own = min(1.0, (sum(trace.cpu_s for trace in traces) + stepped_s) / cores_s)
        wanted = self.neighbours / self.machine.cores
        return own, min(wanted, max(wanted / max(1.0, wanted + own), 1.0 - own))

    def fetch_seconds(self, number: int, *, is_first: bool) -> tuple[float, float]:
        """CPU seconds and waiting of the batch of this number, which varies in the same way in every burst."""
        rng, cv, machine = random.Random(number), self.machine.service_cv, self.machine
        factor = rng.lognormvariate(-0.5 * math.log1p(cv * cv), math.sqrt(math.log1p(cv * cv)))
        factor *= machine.tail_factor if rng.random() < machine.tail_share else 1.0
        factor = factor / (1.0 + machine.tail_share * (machine.tail_factor - 1.0)) * self.slower
        return machine.cpu_s * factor + (machine.first_batch_extra_s if is_first else 0.0), machine.wait_s * factor


@dataclass(slots=True)
class Batch:
    """A batch on its way from a worker to the step."""

    index: int
    worker: int
    cpu_s: float = 0.0
    begun: float = 0.0
    whole: float = 0.0
    requested: float = 0.0
    received: float = 0.0

    def trace(self, step_end: float, samples: int) -> BatchTrace:
        fetched = self.begun + 0.9 * (self.whole - self.begun)
        return BatchTrace(
            *(self.worker, self.begun, fetched, self.whole, self.cpu_s, samples),
            *(self.requested, self.received, step_end),
        )


class Run:
    """One training run, event by event: processor sharing between the workers that compute and the step.

    Three clocks: `now`, the work that each computing worker has got so far, and the work that the step has got; the
    last two run at the speed that the cores allow at the moment.
    """

    def __init__(
        self,
        disturbed: Disturbed,
        config: LoaderConfig,
        order: Iterator[int],
        begun: float,
        *,
        pause_s: float = 0.0,
    ) -> None:
        """A run over these batches; the loop asks for its first batch `pause_s` seconds after the workers have started."""
        self.config, self.order = config, order
        self.disturbed, self.machine = disturbed, disturbed.machine
        workers = config.num_workers
        self.now = begun + (self.machine.start_s + workers * self.machine.worker_start_s)
        self.asked_from = self.now + pause_s
        self.ticks = itertools.count()
        # What happens when: (moment, tie-breaker, what, to which batch), and (work at which it is whole, index, batch).
        self.timed: list[tuple[float, int, Callable[[Batch], None], Batch]] = []
        self.computing: list[tuple[float, int, Batch]] = []
        self.worked = 0.0
        # Workers: numbers and batches that wait for each, who has nothing to do, who has fetched nothing yet. Without any,
        # worker 0 is the training process.
        self.tasks: list[deque[tuple[int, Batch]]] = [deque() for _ in range(workers)]
        self.idle = set(range(workers))
        self.fresh = set(range(max(workers, 1)))
        # The loop: what is ready, in the order of completion, what waits for the step, what the step is at.
        self.ready: dict[int, Batch] = {}
        self.to_step: deque[Batch] = deque()
        self.stepping: Batch | None = None
        self.step_left = math.inf
        self.pinning_until = self.now
        self.handed_out = self.asked_for = self.received = self.done = 0
        self.is_receiving = False
        self.requested_at: float | None = None

    def batches(self) -> Iterator[BatchTrace]:
        """Every batch when its step is done."""
        if self.config.num_workers == 0:
            yield from self._serial()
            return
        for slot in range(self.config.num_workers * (self.config.prefetch_factor or 1)):
            self._hand_out(slot % self.config.num_workers)
        self._at(self.asked_from, lambda _: None, Batch(-1, -1))  # the loop asks after every event
        while self.done < self.handed_out:
            self._request()
            stepped = self._advance()
            if stepped is not None:
                yield stepped.trace(self.now, self.machine.batch_size)

    def _serial(self) -> Iterator[BatchTrace]:
        self.now = self.asked_from
        for index, number in enumerate(self.order):
            cpu_s, wait_s = self.disturbed.fetch_seconds(number, is_first=index in self.fresh)
            crowding = max(1.0, (1.0 + self.disturbed.neighbours) / self.machine.cores)
            requested, fetched = self.now, self.now + cpu_s * crowding + wait_s
            self.now = fetched + self._step_seconds(index) / self.disturbed.step_speed
            batch = Batch(index, MAIN_PROCESS, cpu_s, requested, fetched, requested, fetched)
            yield batch.trace(self.now, self.machine.batch_size)

    def _step_seconds(self, index: int) -> float:
        return self.disturbed.step_seconds * max(0.1, random.Random(~index).gauss(1.0, self.machine.step_cv))

    def _hand_out(self, worker: int) -> None:
        number = next(self.order, None)
        if number is None:
            return
        self.tasks[worker].append((number, Batch(self.handed_out, worker)))
        self.handed_out += 1
        if worker in self.idle:
            self._fetch(worker)

    def _fetch(self, worker: int) -> None:
        if not self.tasks[worker]:
            self.idle.add(worker)
            return
        self.idle.discard(worker)
        number, batch = self.tasks[worker].popleft()
        batch.cpu_s, wait_s = self.disturbed.fetch_seconds(number, is_first=worker in self.fresh)
        self.fresh.discard(worker)
        batch.begun = self.now
        self._at(self.now + wait_s, self._compute, batch)

    def _at(self, when: float, what: Callable[[Batch], None], batch: Batch) -> None:
        heapq.heappush(self.timed, (when, next(self.ticks), what, batch))

    def _stretched(self, running: int) -> float:
        """How much longer computing takes beside `running` others."""
        return 1.0 + self.machine.alpha * running + self.machine.beta * running * (running + 1)

    def _speeds(self) -> tuple[float, float]:
        """Work per second of each computing worker and of the step."""
        computing, cores = len(self.computing), self.machine.cores
        demand = (
            computing + (self.disturbed.step_cores if self.stepping is not None else 0.0) + self.disturbed.neighbours
        )
        fair = min(1.0, cores / demand) if demand else 1.0
        return fair / self._stretched(max(0, min(computing, cores) - 1)), fair if self.disturbed.step_cores else 1.0

    def _request(self) -> None:
        """The training loop takes the batch it wants next, where that is ready and the step lets it."""
        is_ahead = self.received > self.done + self.config.device_prefetch
        if self.is_receiving or is_ahead or self.now < self.asked_from:
            return
        if self.requested_at is None:
            self.requested_at = self.now
        wanted = self.asked_for if self.config.in_order else next(iter(self.ready), None)
        if wanted in self.ready:
            self.asked_for += 1
            self.is_receiving = True
            self._at(self.now + self.machine.receive_s * self.disturbed.slower, self._receive, self.ready.pop(wanted))

    def _advance(self) -> Batch | None:
        """Go to the next event; the batch whose step that ended, if it did."""
        worker_speed, step_speed = self._speeds()
        until_whole = (self.computing[0][0] - self.worked) / worker_speed if self.computing else math.inf
        until_timed = self.timed[0][0] - self.now if self.timed else math.inf
        until_step = self.step_left / step_speed
        passed = max(0.0, min(until_whole, until_timed, until_step))
        self.now += passed
        self.worked += passed * worker_speed
        self.step_left -= passed * step_speed
        if until_step <= passed:
            stepped, self.stepping, self.step_left = self.stepping, None, math.inf
            self.done += 1
            self._step_next()
            return stepped
        if until_whole <= passed:
            self._complete(heapq.heappop(self.computing)[2])
            return None
        when, _, what, batch = heapq.heappop(self.timed)
        self.now = max(self.now, when)  # what was added up may fall short of it by a rounding
        what(batch)
        return None

    def _compute(self, batch: Batch) -> None:
        heapq.heappush(self.computing, (self.worked + batch.cpu_s, batch.index, batch))

    def _complete(self, batch: Batch) -> None:
        batch.whole = self.now
        batch.cpu_s *= self._stretched(min(len(self.computing) + 1, self.machine.cores) - 1)
        self._fetch(batch.worker)
        if self.config.pin_memory:
            self.pinning_until = max(self.now, self.pinning_until) + self.machine.pin_s * self.disturbed.slower
            self._at(self.pinning_until, self._offer, batch)
        else:
            self._offer(batch)

    def _offer(self, batch: Batch) -> None:
        self.ready[batch.index] = batch

    def _receive(self, batch: Batch) -> None:
        assert self.requested_at is not None
        batch.requested, batch.received = self.requested_at, self.now
        self.requested_at, self.is_receiving = None, False
        self.received += 1
        self._hand_out(self.handed_out % self.config.num_workers if self.config.in_order else batch.worker)
        self.to_step.append(batch)
        self._step_next()

    def _step_next(self) -> None:
        if self.stepping is None and self.to_step:
            self.stepping = self.to_step.popleft()
            self.step_left = self._step_seconds(self.stepping.index)
