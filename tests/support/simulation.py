"""A clock that is told to move, a machine as parameters, and a probe that trains on it."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune_loader.bursts.bench import IN_HAND
from autotune_loader.pipeline.throughput import is_enough, summarise
from autotune_loader.values import (
    MAIN_PROCESS,
    TORCH_PREFETCH_FACTOR,
    BatchTrace,
    BurstPlan,
    Failure,
    LoaderConfig,
    Measurement,
    MemoryUse,
)

BASE_BYTES = 500 << 20  # What training needs without any worker
SPIKE_FACTOR = 1.5  # How much slower a burst is that something disturbs


class FakeClock:
    """A monotonic clock that moves only when told to: it goes where `time.monotonic` would."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on; returns the new time."""
        assert seconds >= 0, seconds
        self.now += seconds
        return self.now

    sleep = advance


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """A machine with a workload on it. Seconds are those of one batch."""

    cores: int = 4
    batch_size: int = 32
    cpu_s: float = 0.04  # CPU seconds of a worker, alone on the machine
    wait_s: float = 0.0  # seconds in which a worker waits for storage or the network
    service_cv: float = 0.1  # coefficient of variation of service times, a property of the samples
    tail_share: float = 0.0  # share of batches that take `tail_factor` times as long
    tail_factor: float = 5.0
    receive_s: float = 0.0005  # in which the training loop takes a ready batch over
    step_s: float = 0.01  # of an undisturbed training step
    step_cores: float = 0.0  # that the step uses; 0 on an accelerator: workers cannot disturb it
    step_cv: float = 0.02
    alpha: float = 0.05  # growth of CPU seconds per further worker that runs (caches, memory)
    beta: float = 0.0  # the same, per pair of running workers
    full_cores: float | None = None  # beyond so many that run each adds `further_core` (SMT)
    further_core: float = 1.0
    servers: int | None = None  # workers whose waiting storage serves at once; None: all
    receive_growth: float = 0.0  # relative growth of `receive_s` per worker
    depth_growth: float = 0.0  # of CPU seconds and `receive_s` per doubling of the batches ahead
    pin_s: float = 0.0  # in which a thread beside the loop pins a batch, with pin_memory
    lock_s: float = 0.0  # more where it locks new pages, as more batches than ever are in use
    copy_s: float = 0.0  # in which the loop copies a batch to the device that is not pinned
    in_loop: float = 1.0  # factor on a step beside threads that receive: one interpreter has both
    memory_bytes_per_s: float = 4e9  # at which a worker writes a ready batch into shared memory
    probe_s: float = 1.5  # until a probe is warm: its start, imports, compilation
    start_s: float = 0.05
    worker_start_s: float = 0.02  # one after the other; then the first indices are handed out
    first_batch_extra_s: float = 0.02  # CPU seconds that each worker's first batch takes longer
    batch_bytes: int = 1 << 20
    worker_bytes: int = 100 << 20  # private memory of one worker
    noise_sd: float = 0.0  # relative, between bursts of one configuration
    noise_is_of_workers: bool = False  # step and receipt scatter by themselves, not with workers
    drift_per_hour: float = 0.0  # relative growth of all times per hour of the probe's clock
    spike_share: float = 0.0  # share of bursts that something disturbs
    neighbours: float | None = None  # cores that others want; None: nothing measures use of CPUs
    neighbours_share: float = 1.0  # share of bursts beside which they run
    fails: Callable[[LoaderConfig], Failure | None] | None = None  # what fails, and how


class SimulatedProbe:
    """A `Probe` that trains on a `SimulatedMachine`: workers, cores and queues event by event.

    Queues and the equal sharing of cores emerge from the events. `alpha` and `beta` are the twin's
    own law of contention; a machine with `full_cores`, `servers`, `receive_growth` or
    `depth_growth` has a law that the twin lacks. The dataset has `epoch_batches` batches, or never
    ends where that is None. As many batches have locked pages as a loop of as many workers as
    cores has in use.
    """

    def __init__(self, machine, clock, *, seed=0, epoch_batches=None) -> None:
        self.machine, self.epoch_batches = machine, epoch_batches
        self.bursts: list[LoaderConfig] = []  # every configuration that was asked for, in order
        self._clock, self._rng = clock, random.Random(seed)
        self._truths: dict[LoaderConfig, float] = {}
        self._begun = itertools.count()
        self._locked = [TORCH_PREFETCH_FACTOR * machine.cores + IN_HAND]

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment of simulated time, by which the clock moves on."""
        self.bursts.append(config)
        failure = self.machine.fails(config) if self.machine.fails else None
        if failure:
            self._clock.advance(self.machine.start_s)
            return failure
        return self._train(self.machine, config, plan)

    def hand_over(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train on copies of the first batch."""
        none = dict.fromkeys(("wait_s", "service_cv", "tail_share", "first_batch_extra_s"), 0.0)
        copied_s = self.machine.batch_bytes / self.machine.memory_bytes_per_s
        machine = replace(self.machine, cpu_s=copied_s, servers=None, **none)
        return self._train(machine, config, plan)

    def _train(self, machine, config, plan) -> Measurement | Failure:
        disturbed, begun, traces = self._disturbed(machine), self._clock(), list[BatchTrace]()
        next_check = begun
        order = self._order(next(self._begun))
        for trace in Run(disturbed, config, order, begun, plan.prefill_s, self._locked).batches():
            traces.append(trace)
            if (now := trace.step_end) - begun > plan.deadline_s:
                self._clock.advance(plan.deadline_s)
                return Failure(kind="deadline", phase="batches", message="it took too long")
            workers, count = config.num_workers, len(traces)
            if count > 1 and (now >= next_check or (count <= 3 * workers and count % workers == 0)):
                next_check = now + 0.05
                if is_enough(traces, plan, delivered=count, workers=workers, now=now):
                    break
        self._clock.advance(traces[-1].step_end - begun)
        return self._measurement(config, traces, begun, disturbed)

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        """Step on one batch again and again."""
        disturbed, traces = self._disturbed(self.machine), list[BatchTrace]()
        begun = now = self._clock()
        while now - begun < plan.min_s or len(traces) < 3:
            batch = Batch(0, MAIN_PROCESS, 0.0, now, now, now, now)
            now += disturbed.step_seconds / disturbed.step_speed
            traces.append(batch.trace(now, self.machine.batch_size))
        self._clock.advance(now - begun)
        return self._measurement(LoaderConfig(), traces, begun, disturbed)

    def truth(self, config: LoaderConfig, *, batches: int = 2000, warm: int | None = None) -> float:
        """Samples per second in the long run, without noise, drift, spikes and neighbours.

        Both ends of the batches that are timed are averaged over a round of the workers, who
        deliver in waves. The same number of `warm` ones for all configurations makes them read the
        same batches; without it they fill every queue.
        """
        if config not in self._truths:
            warm = warm or 2 * config.num_workers * ((config.prefetch_factor or 0) + 1) + 1
            run = Run(Disturbed(self.machine, 1.0, 1.0), config, self._order(0), 0.0)
            ends = [trace.step_end for trace in itertools.islice(run.batches(), warm + batches)]
            wave = min(max(config.num_workers, 1), batches // 2)
            begun, ended = sum(ends[warm : warm + wave]) / wave, sum(ends[-wave:]) / wave
            self._truths[config] = self.machine.batch_size * (batches - wave) / (ended - begun)
        return self._truths[config]

    def _order(self, seed: int) -> Iterator[int]:
        """The batches of a run: ever new ones, or those of the dataset, shuffled anew."""
        if self.epoch_batches is None:
            return itertools.count(seed * 1_000_003)
        rng, dataset = random.Random(seed), range(self.epoch_batches)
        return itertools.chain.from_iterable(
            rng.sample(dataset, len(dataset)) for _ in itertools.count()
        )

    def _disturbed(self, machine: SimulatedMachine) -> Disturbed:
        slower = loop_slower = math.exp(self._rng.gauss(0.0, machine.noise_sd))
        if machine.noise_is_of_workers:
            loop_slower = math.exp(self._rng.gauss(0.0, machine.noise_sd))
        drift = 1.0 + machine.drift_per_hour * self._clock() / 3600.0
        slower *= drift
        loop_slower *= drift
        spike = SPIKE_FACTOR if self._rng.random() < machine.spike_share else 1.0
        are_there = machine.neighbours and self._rng.random() < machine.neighbours_share
        neighbours = machine.neighbours if are_there else 0.0
        return Disturbed(machine, slower * spike, loop_slower * spike, neighbours)

    def _measurement(self, config, traces, begun, disturbed) -> Measurement:
        own, foreign = disturbed.cpu_shares(traces)
        queued_bytes = (config.prefetch_factor or 0) * self.machine.batch_bytes
        worker_bytes = config.num_workers * (self.machine.worker_bytes + queued_bytes)
        return replace(
            summarise(traces, workers=config.num_workers, started=begun),
            cpu_share=own, foreign_cpu_share=foreign, traces=tuple(traces),
            batch_bytes=self.machine.batch_bytes,
            memory=MemoryUse(rss_bytes=BASE_BYTES + worker_bytes),
        )  # fmt: skip


class Disturbed:
    """A machine during one burst: fetching takes `slower` times as long, the loop `loop_slower`.

    Others want `neighbours` cores.
    """

    def __init__(self, machine, slower: float, loop_slower: float, neighbours: float = 0.0) -> None:
        self.machine, self.neighbours = machine, neighbours
        self.slower, self.loop_slower = slower, loop_slower
        self.step_cores = min(machine.step_cores, machine.cores)
        self.step_seconds = machine.step_s * loop_slower
        demand = self.step_cores + neighbours
        # Of its own speed, what a step gets beside neighbours.
        self.step_speed = min(1.0, machine.cores / demand) if self.step_cores else 1.0

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
        """CPU seconds and waiting of the batch of this number, the same in every burst."""
        rng, cv, machine = random.Random(number), self.machine.service_cv, self.machine
        factor = rng.lognormvariate(-0.5 * math.log1p(cv * cv), math.sqrt(math.log1p(cv * cv)))
        factor *= machine.tail_factor if rng.random() < machine.tail_share else 1.0
        factor = factor / (1.0 + machine.tail_share * (machine.tail_factor - 1.0)) * self.slower
        extra_s = machine.first_batch_extra_s if is_first else 0.0
        return machine.cpu_s * factor + extra_s, machine.wait_s * factor

    def step_of(self, index: int, config: LoaderConfig) -> float:
        """Seconds of the step of the batch with this index, its copy included."""
        varied = random.Random(~index).gauss(1.0, self.machine.step_cv)
        step_s = self.step_seconds * max(0.1, varied)
        copy_s = 0.0 if config.pin_memory else self.machine.copy_s * self.loop_slower
        return copy_s + step_s * (self.machine.in_loop if config.num_workers else 1.0)


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
    pinning: tuple[float, float] | tuple[()] = ()

    def trace(self, step_end: float, samples: int) -> BatchTrace:
        fetched = self.begun + 0.9 * (self.whole - self.begun)
        worker = self.worker, self.begun, fetched, self.whole, self.cpu_s
        return BatchTrace(*worker, samples, self.requested, self.received, step_end, *self.pinning)


class Run:
    """One training run, event by event: workers that compute and the step share processors.

    Three clocks: `now`, the work that each computing worker has got so far, and the work that the
    step has got; the last two run at the speed that the cores allow at the moment. The loop asks
    for its first batch `pause_s` seconds after the workers have started. `locked` is how many
    batches have had locked pages at once so far.
    """

    def __init__(self, disturbed, config, order, begun, pause_s=0.0, locked=None) -> None:
        self.config, self.order = config, order
        self.locked = [math.inf] if locked is None else locked
        self.pinned = 0
        self.pinning_until = 0.0
        self.deeper = 1.0 + disturbed.machine.depth_growth * math.log2(config.prefetch_factor or 1)
        self.disturbed, self.machine = disturbed, disturbed.machine
        workers = config.num_workers
        self.now = begun + (self.machine.start_s + workers * self.machine.worker_start_s)
        self.asked_from = self.now + pause_s
        self.ticks = itertools.count()
        # What happens when: (moment, tie-breaker, what, to which batch), and (work at which it is
        # whole, index, batch).
        self.timed: list[tuple[float, int, Callable[[Batch], None], Batch]] = []
        self.computing: list[tuple[float, int, Batch]] = []
        self.worked = 0.0
        # Workers: numbers and batches that wait for each, who has nothing to do, who has fetched
        # nothing yet. Without any, worker 0 is the training process.
        self.tasks: list[deque[tuple[int, Batch]]] = [deque() for _ in range(workers)]
        self.idle, self.fresh = set(range(workers)), set(range(max(workers, 1)))
        # The loop, which takes the next batch once its step is done: what is ready, what it is at.
        self.ready: dict[int, Batch] = {}
        self.stepping: Batch | None = None
        self.step_left = math.inf
        self.handed_out = self.received = self.done = 0
        self.is_receiving, self.requested_at = False, math.nan
        self.served_until = [0.0] * (self.machine.servers or 0)

    def batches(self) -> Iterator[BatchTrace]:
        """Every batch when its step is done."""
        if self.config.num_workers == 0:
            yield from self._serial()
            return
        for slot in range(self.config.num_workers * (self.config.prefetch_factor or 1)):
            self._hand_out(slot % self.config.num_workers)
        self._at(self.asked_from, lambda _: None, Batch(-1, -1))  # it asks after every event
        while self.done < self.handed_out:
            self._request()
            if (stepped := self._advance()) is not None:
                yield stepped.trace(self.now, self.machine.batch_size)

    def _serial(self) -> Iterator[BatchTrace]:
        self.now = self.asked_from
        crowding = max(1.0, (1.0 + self.disturbed.neighbours) / self.machine.cores)
        for index, number in enumerate(self.order):
            cpu_s, wait_s = self.disturbed.fetch_seconds(number, is_first=index in self.fresh)
            requested, fetched = self.now, self.now + cpu_s * crowding + wait_s
            step_s = self.disturbed.step_of(index, self.config)
            self.now = fetched + step_s / self.disturbed.step_speed
            batch = Batch(index, MAIN_PROCESS, cpu_s, requested, fetched, requested, fetched)
            yield batch.trace(self.now, self.machine.batch_size)

    def _at(self, when: float, what: Callable[[Batch], None], batch: Batch) -> None:
        heapq.heappush(self.timed, (when, next(self.ticks), what, batch))

    def _hand_out(self, worker: int) -> None:
        if (number := next(self.order, None)) is None:
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
        batch.cpu_s *= self.deeper
        self.fresh.discard(worker)
        batch.begun = served = self.now
        if self.served_until:
            served = max(self.now, self.served_until[0])
            heapq.heapreplace(self.served_until, served + wait_s)
        self._at(served + wait_s, self._compute, batch)

    def _compute(self, batch: Batch) -> None:
        heapq.heappush(self.computing, (self.worked + batch.cpu_s, batch.index, batch))

    def _complete(self, batch: Batch) -> None:
        batch.whole = self.now
        batch.cpu_s *= self._stretched(len(self.computing) + 1)
        self._fetch(batch.worker)
        if self.config.pin_memory and self.machine.pin_s:
            self._pin(batch)
        else:
            self.ready[batch.index] = batch

    def _pin(self, batch: Batch) -> None:
        """A thread beside the loop pins one batch after the other, and locks pages that are new."""
        self.pinned += 1
        lock_s = 0.0
        if self.pinned - self.done > self.locked[0]:
            self.locked[0] += 1
            lock_s = self.machine.lock_s
        begun = max(self.now, self.pinning_until)
        self.pinning_until = begun + self.machine.pin_s * self.disturbed.loop_slower + lock_s
        batch.pinning = begun, self.pinning_until
        arrive = lambda pinned: self.ready.__setitem__(pinned.index, pinned)  # noqa: E731
        self._at(self.pinning_until, arrive, batch)

    def _request(self) -> None:
        """The training loop takes the batch it wants next, where that is ready and it may."""
        if self.is_receiving or self.received > self.done or self.now < self.asked_from:
            return
        if math.isnan(self.requested_at):
            self.requested_at = self.now
        if self.received in self.ready:
            self.is_receiving = True
            batch = self.ready.pop(self.received)
            grown = (1.0 + self.machine.receive_growth * self.config.num_workers) * self.deeper
            receive_s = self.machine.receive_s * grown * self.disturbed.loop_slower
            self._at(self.now + receive_s, self._receive, batch)

    def _receive(self, batch: Batch) -> None:
        batch.requested, batch.received = self.requested_at, self.now
        self.is_receiving, self.requested_at = False, math.nan
        self.received += 1
        self._hand_out(self.handed_out % self.config.num_workers)
        self.stepping, self.step_left = batch, self.disturbed.step_of(batch.index, self.config)

    def _stretched(self, computing: int) -> float:
        """How much longer computing takes for one of so many."""
        machine, running = self.machine, max(1, min(computing, self.machine.cores))
        full = min(running, machine.full_cores or running)
        slowed = running / (full + machine.further_core * (running - full))
        return slowed * (1.0 + (machine.alpha + machine.beta * running) * (running - 1))

    def _speeds(self) -> tuple[float, float]:
        """Work per second of each computing worker and of the step."""
        computing, step_cores = len(self.computing), self.disturbed.step_cores
        stepping = step_cores if self.stepping is not None else 0.0
        demand = computing + stepping + self.disturbed.neighbours
        fair = min(1.0, self.machine.cores / demand) if demand else 1.0
        return fair / self._stretched(computing), fair if step_cores else 1.0

    def _advance(self) -> Batch | None:
        """Go to the next event; the batch whose step that ended, if it did."""
        worker_speed, step_speed = self._speeds()
        until_whole = until_timed = math.inf
        if self.computing:
            until_whole = (self.computing[0][0] - self.worked) / worker_speed
        if self.timed:
            until_timed = self.timed[0][0] - self.now
        until_step = self.step_left / step_speed
        passed = max(0.0, min(until_whole, until_timed, until_step))
        self.now += passed
        self.worked += passed * worker_speed
        self.step_left -= passed * step_speed
        if until_step <= passed:
            stepped, self.stepping, self.step_left = self.stepping, None, math.inf
            self.done += 1
            return stepped
        if until_whole <= passed:
            self._complete(heapq.heappop(self.computing)[2])
        else:
            when, _, what, batch = heapq.heappop(self.timed)
            self.now = max(self.now, when)  # what was added up may fall short of it by a rounding
            what(batch)
        return None
