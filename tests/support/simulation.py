"""A probe that trains on a simulated machine: workers, cores and queues, event by event, on a fake clock."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autotune_loader.pipeline.throughput import are_enough_epochs, is_enough, over_epochs, summarise
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement, MemoryUse
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from tests.support.machine import SimulatedMachine


class Clock(Protocol):
    """What a simulated burst needs of a clock: to be read and to be moved on."""

    def __call__(self) -> float: ...

    def advance(self, seconds: float, /) -> object: ...


class SimulatedProbe:
    """A `Probe` that trains on a `SimulatedMachine`: workers, cores and queues are simulated event by event.

    Runnable processes share the cores equally, so stretching by contention emerges from the events; nothing here uses
    the twin's formulas. `truth` tells what no burst can: the rate without noise.
    """

    def __init__(
        self, machine: SimulatedMachine, clock: Clock, *, seed: int = 0, epoch_batches: int | None = None
    ) -> None:
        """A probe of a dataset of `epoch_batches` batches, or, where that is None, of one that never ends."""
        self.machine = machine
        self.epoch_batches = epoch_batches
        self.bursts: list[LoaderConfig] = []
        """Every configuration that was asked for, in order."""
        self._clock = clock
        self._rng = random.Random(seed)
        self._truths: dict[LoaderConfig, float] = {}

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment of simulated time, by which the clock moves on."""
        self.bursts.append(config)
        failure = self.machine.fails(config) if self.machine.fails else None
        failure = failure or self._memory_failure(config)
        if failure:
            self._clock.advance(self.machine.start_s)
            return failure
        if plan.whole_epochs:
            return self._burst_of_epochs(config, plan)
        disturbed = self._disturbed()
        run = _Events(disturbed, config, self._order(plan.seed), self._clock(), pause_s=plan.prefill_s)
        begun = next_check = self._clock()
        traces: list[BatchTrace] = []
        for trace in run.batches():
            traces.append(trace)
            now = trace.step_end
            if now - begun > plan.deadline_s:
                return self._past_deadline(plan)
            if now >= next_check and len(traces) > 1:
                next_check = now + 0.05
                if is_enough(traces, plan, workers=config.num_workers, now=now):
                    break
        self._clock.advance(traces[-1].step_end - begun)
        return self._measurement(config, traces, begun, disturbed)

    def _past_deadline(self, plan: BurstPlan) -> Failure:
        self._clock.advance(plan.deadline_s)
        return Failure(kind="deadline", phase="batches", message="the simulated burst took too long")

    def _burst_of_epochs(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        begun = self._clock()
        ends, traces, disturbed = list[float](), list[BatchTrace](), self._disturbed()
        for epoch in self._epochs(disturbed, config, plan.seed, begun):
            traces += epoch
            ends.append(epoch[-1].step_end)
            if ends[-1] - begun > plan.deadline_s:
                return self._past_deadline(plan)
            if are_enough_epochs(ends, plan, begun):
                break
        self._clock.advance(ends[-1] - begun)
        samples = (len(ends) - 1) * len(epoch) * self.machine.batch_size
        measured = self._measurement(config, traces, begun, disturbed)
        return over_epochs(measured, ends, samples)

    def _epochs(
        self, disturbed: _Disturbed, config: LoaderConfig, seed: int, begun: float
    ) -> Iterator[list[BatchTrace]]:
        """Epoch after epoch, each in an order of its own; workers that persist are started once."""
        if self.epoch_batches is None:
            raise ValueError(
                "whole_epochs=True of an endless dataset; SimulatedProbe(..., epoch_batches=16) would work"
            )
        batches = self._order(seed)
        for number in itertools.count():
            order = itertools.islice(batches, self.epoch_batches)
            is_running = number > 0 and (config.persistent_workers or not config.num_workers)
            epoch = list(_Events(disturbed, config, order, begun, is_running=is_running).batches())
            begun = epoch[-1].step_end
            yield epoch

    def _order(self, seed: int) -> Iterator[int]:
        """Numbers of the batches that a run reads: ever new ones, or all of the dataset again and again, shuffled."""
        if self.epoch_batches is None:
            return itertools.count(seed * 1_000_003)
        rng, dataset = random.Random(seed), range(self.epoch_batches)
        return itertools.chain.from_iterable(rng.sample(dataset, len(dataset)) for _ in itertools.count())

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        """Step on one batch again and again."""
        disturbed = self._disturbed()
        begun = now = self._clock()
        traces: list[BatchTrace] = []
        while now - begun < plan.min_s or len(traces) < 3:
            end = now + disturbed.step_seconds(consumer_threads) / disturbed.step_speed(consumer_threads)
            traces.append(_trace(MAIN_PROCESS, (now, now), 0.0, now, now, end, self.machine.batch_size))
            now = end
        self._clock.advance(now - begun)
        return self._measurement(LoaderConfig(consumer_threads=consumer_threads), traces, begun, disturbed)

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
            run = _Events(_Disturbed(self.machine, 1.0), config, self._order(0), 0.0)
            ends = [trace.step_end for trace in itertools.islice(run.batches(), warm + batches)]
            wave = min(max(config.num_workers, 1), batches // 2)
            begun, ended = sum(ends[warm : warm + wave]) / wave, sum(ends[-wave:]) / wave
            self._truths[config] = self.machine.batch_size * (batches - wave) / (ended - begun)
        return self._truths[config]

    def _disturbed(self) -> _Disturbed:
        machine = self.machine
        slower = math.exp(self._rng.gauss(0.0, machine.noise_sd))
        slower *= 1.0 + machine.drift_per_hour * self._clock() / 3600.0
        if self._rng.random() < machine.spike_share:
            slower *= machine.spike_factor
        are_there = machine.neighbours and self._rng.random() < machine.neighbours_share
        return _Disturbed(machine, slower, (machine.neighbours or 0.0) if are_there else 0.0)

    def _rss_bytes(self, config: LoaderConfig) -> int:
        queued = config.num_workers * (config.prefetch_factor or 0) * self.machine.batch_bytes
        return self.machine.base_bytes + config.num_workers * self.machine.worker_bytes + queued

    def _memory_failure(self, config: LoaderConfig) -> Failure | None:
        limit, needed = self.machine.memory_limit_bytes, self._rss_bytes(config)
        if limit is None or needed <= limit:
            return None
        message = f"the burst needs {needed} bytes of {limit}; use fewer workers"
        return Failure(kind="memory_guard", phase="batches", message=message)

    def _measurement(
        self, config: LoaderConfig, traces: list[BatchTrace], begun: float, disturbed: _Disturbed
    ) -> Measurement:
        own, foreign = disturbed.cpu_shares(traces, config.consumer_threads)
        return replace(
            summarise(traces, workers=config.num_workers, started=begun),
            cpu_share=own,
            foreign_cpu_share=foreign,
            batch_bytes=self.machine.batch_bytes,
            batch_tensors=2,
            memory=MemoryUse(rss_bytes=self._rss_bytes(config)),
            traces=tuple(traces),
        )


@dataclass(frozen=True, slots=True)
class _Disturbed:
    """A machine during one burst, in which everything takes `slower` times as long."""

    machine: SimulatedMachine
    slower: float
    neighbours: float = 0.0
    """Cores that others want."""

    def step_cores(self, consumer_threads: int | None) -> float:
        threads = math.inf if consumer_threads is None else consumer_threads
        return min(self.machine.step_cores, threads, self.machine.cores)

    def step_speed(self, consumer_threads: int | None) -> float:
        """Of its own speed, what a step gets beside neighbours."""
        demand = self.step_cores(consumer_threads) + self.neighbours
        return min(1.0, self.machine.cores / demand) if self.step_cores(consumer_threads) else 1.0

    def cpu_shares(
        self, traces: Sequence[BatchTrace], consumer_threads: int | None
    ) -> tuple[float | None, float | None]:
        """What our processes and others took of the cores; None where the machine has no meter."""
        if self.machine.neighbours is None:
            return None, None
        cores_s = self.machine.cores * (traces[-1].step_end - traces[0].requested)
        stepped_s = len(traces) * self.step_seconds(consumer_threads) * self.step_cores(consumer_threads)
        own = min(1.0, (sum(trace.cpu_s for trace in traces) + stepped_s) / cores_s)
        wanted = self.neighbours / self.machine.cores
        fair = wanted / max(1.0, wanted + own)
        return own, min(wanted, max(fair, 1.0 - own))

    def step_seconds(self, consumer_threads: int | None) -> float:
        seconds = self.machine.step_s
        if consumer_threads is not None:
            seconds = self.machine.step_s_by_threads.get(consumer_threads, seconds)
        return seconds * self.slower

    def variation(self, number: int) -> float:
        """How much longer than the mean the batch of this number takes: the same in every burst."""
        rng = random.Random(number)
        cv, machine = self.machine.service_cv, self.machine
        factor = rng.lognormvariate(-0.5 * math.log1p(cv * cv), math.sqrt(math.log1p(cv * cv)))
        factor *= machine.tail_factor if rng.random() < machine.tail_share else 1.0
        return factor / (1.0 + machine.tail_share * (machine.tail_factor - 1.0))


def _trace(
    worker: int,
    fetched: tuple[float, float],
    cpu_s: float,
    requested: float,
    received: float,
    step_end: float,
    samples: int,
) -> BatchTrace:
    start, end = fetched
    return BatchTrace(
        worker=worker,
        fetch_start=start,
        fetch_end=start + 0.9 * (end - start),
        collate_end=end,
        cpu_s=cpu_s,
        requested=requested,
        received=received,
        step_end=step_end,
        samples=samples,
    )


class _Events:
    """One training run, event by event: processor sharing between the workers that compute and the step.

    Three clocks: `now`, the work that each computing worker has got so far, and the work that the step has got; the
    last two run at the speed that the cores allow at the moment.
    """

    def __init__(
        self,
        disturbed: _Disturbed,
        config: LoaderConfig,
        order: Iterator[int],
        begun: float,
        *,
        is_running: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        """A run over these batches, by workers that start when it begins or, if `is_running`, are there already.

        The loop asks for its first batch `pause_s` seconds after they have started.
        """
        self.disturbed, self.machine, self.config = disturbed, disturbed.machine, config
        self.order = order
        self.numbers: list[int] = []  # of the batches handed out
        self.step_cores = disturbed.step_cores(config.consumer_threads)
        self.step_s = disturbed.step_seconds(config.consumer_threads)
        self.now = begun
        if not is_running:
            self.now += self.machine.start_s + config.num_workers * self.machine.worker_start_s
        self.asked_from = self.now + pause_s
        self.timed: list[tuple[float, int, Callable[[int], None], int]] = []  # (when, tie-breaker, what happens, batch)
        self.computing: list[tuple[float, int]] = []  # (work at which it is whole, batch)
        self.worked = 0.0
        self.step_left = math.inf  # work left of the running step
        self.stepping: int | None = None
        self.index_queues: list[deque[int]] = [deque() for _ in range(config.num_workers)]
        self.idle = set(range(config.num_workers))
        # Who has not fetched yet; without workers that is the training process.
        self.fresh = set() if is_running else set(range(max(config.num_workers, 1)))
        self.owner: dict[int, int] = {}
        self.span: dict[int, tuple[float, float]] = {}
        self.cpu: dict[int, float] = {}
        self.ready: dict[int, None] = {}  # insertion order is the order of completion
        self.pinning_until = self.now
        self.next_in_order = self.received_count = self.done_count = 0
        self.receiving = False
        self.requested_at: float | None = None
        self.requests: dict[int, tuple[float, float]] = {}
        self.to_step: deque[int] = deque()
        self.ticks = itertools.count()

    def batches(self) -> Iterator[BatchTrace]:
        """Every batch when its step is done."""
        if self.config.num_workers == 0:
            yield from self._serial()
            return
        for slot in range(self.config.num_workers * (self.config.prefetch_factor or 1)):
            self._hand_out(slot % self.config.num_workers)
        self._at(self.asked_from, lambda _: None, -1)  # the loop asks after every event
        while self.done_count < len(self.numbers):
            self._request()
            done = self._advance()
            if done is not None:
                yield done

    def _serial(self) -> Iterator[BatchTrace]:
        self.now = self.asked_from
        for index, number in enumerate(self.order):
            cpu_s, wait_s = self._work(number, first=index in self.fresh)
            crowding = max(1.0, (1.0 + self.disturbed.neighbours) / self.machine.cores)
            requested, fetched = self.now, self.now + cpu_s * crowding + wait_s
            self.now = fetched + self._step_seconds(index) / self.disturbed.step_speed(self.config.consumer_threads)
            span = (requested, fetched)
            yield _trace(MAIN_PROCESS, span, cpu_s, requested, fetched, self.now, self.machine.batch_size)

    def _work(self, number: int, *, first: bool) -> tuple[float, float]:
        factor = self.disturbed.variation(number) * self.disturbed.slower
        extra = self.machine.first_batch_extra_s if first else 0.0
        return self.machine.cpu_s * factor + extra, self.machine.wait_s * factor

    def _step_seconds(self, index: int) -> float:
        return self.step_s * max(0.1, random.Random(~index).gauss(1.0, self.machine.step_cv))

    def _hand_out(self, worker: int) -> None:
        number = next(self.order, None)
        if number is None:
            return
        index = len(self.numbers)
        self.numbers.append(number)
        self.owner[index] = worker
        self.index_queues[worker].append(index)
        if worker in self.idle:
            self._fetch(worker)

    def _fetch(self, worker: int) -> None:
        if not self.index_queues[worker]:
            self.idle.add(worker)
            return
        self.idle.discard(worker)
        index = self.index_queues[worker].popleft()
        self.cpu[index], wait_s = self._work(self.numbers[index], first=worker in self.fresh)
        self.fresh.discard(worker)
        self.span[index] = (self.now, math.inf)
        self._at(self.now + wait_s, self._compute, index)

    def _at(self, when: float, what: Callable[[int], None], index: int) -> None:
        heapq.heappush(self.timed, (when, next(self.ticks), what, index))

    def _speeds(self) -> tuple[float, float]:
        """Work per second of each computing worker and of the step."""
        computing, cores = len(self.computing), self.machine.cores
        demand = computing + (self.step_cores if self.stepping is not None else 0.0) + self.disturbed.neighbours
        fair = min(1.0, cores / demand) if demand else 1.0
        more = max(0, min(computing, cores) - 1)
        return fair / (1.0 + self.machine.alpha * more + self.machine.beta * more * (more + 1)), fair

    def _request(self) -> None:
        """The training loop takes the batch it wants next, where that is ready and the step lets it."""
        if self.receiving or self.received_count > self.done_count + self.config.device_prefetch:
            return
        if self.now < self.asked_from:
            return
        if self.requested_at is None:
            self.requested_at = self.now
        wanted = self.next_in_order if self.config.in_order else next(iter(self.ready), None)
        if wanted is None or wanted not in self.ready:
            return
        del self.ready[wanted]
        self.next_in_order += 1
        self.receiving = True
        self._at(self.now + self.machine.receive_s * self.disturbed.slower, self._received, wanted)

    def _advance(self) -> BatchTrace | None:
        """Go to the next event; the batch whose step that ended, if it did."""
        worker_speed, step_speed = self._speeds()
        step_speed = step_speed if self.step_cores else 1.0
        until_whole = (self.computing[0][0] - self.worked) / worker_speed if self.computing else math.inf
        until_timed = self.timed[0][0] - self.now if self.timed else math.inf
        until_step = self.step_left / step_speed
        passed = max(0.0, min(until_whole, until_timed, until_step))
        self.now += passed
        self.worked += passed * worker_speed
        self.step_left -= passed * step_speed
        if until_step <= passed:
            return self._step_is_done()
        if until_whole <= passed:
            self._batch_is_whole(heapq.heappop(self.computing)[1])
            return None
        when, _, what, index = heapq.heappop(self.timed)
        self.now = max(self.now, when)  # what was added up may fall short of it by a rounding
        what(index)
        return None

    def _compute(self, index: int) -> None:
        heapq.heappush(self.computing, (self.worked + self.cpu[index], index))

    def _batch_is_whole(self, index: int) -> None:
        start, _ = self.span[index]
        self.span[index] = (start, self.now)
        running = min(len(self.computing) + 1, self.machine.cores) - 1
        self.cpu[index] *= 1.0 + self.machine.alpha * running + self.machine.beta * running * (running + 1)
        self._fetch(self.owner[index])
        if self.config.pin_memory:
            self.pinning_until = max(self.now, self.pinning_until) + self.machine.pin_s * self.disturbed.slower
            self._at(self.pinning_until, self._is_ready, index)
        else:
            self._is_ready(index)

    def _is_ready(self, index: int) -> None:
        self.ready[index] = None

    def _received(self, index: int) -> None:
        assert self.requested_at is not None
        self.requests[index] = (self.requested_at, self.now)
        self.requested_at = None
        self.receiving = False
        self.received_count += 1
        self._hand_out(len(self.numbers) % self.config.num_workers if self.config.in_order else self.owner[index])
        self.to_step.append(index)
        self._step_next()

    def _step_next(self) -> None:
        if self.stepping is None and self.to_step:
            self.stepping = self.to_step.popleft()
            self.step_left = self._step_seconds(self.stepping)

    def _step_is_done(self) -> BatchTrace:
        assert self.stepping is not None
        index, self.stepping, self.step_left = self.stepping, None, math.inf
        self.done_count += 1
        requested, received = self.requests.pop(index)
        worker, span, cpu_s = self.owner.pop(index), self.span.pop(index), self.cpu.pop(index)
        self._step_next()
        return _trace(worker, span, cpu_s, requested, received, self.now, self.machine.batch_size)
