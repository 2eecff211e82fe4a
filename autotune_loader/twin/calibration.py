"""All that the bursts taught, and the fixed point that turns it into the stage times of any configuration.

The contention model gives the shape between and beyond the bursts; the *nodes* bend it so that it passes through each
of them. Every fitted value is an array over draws: the first `BEST` are the best fit, the others draws from its
uncertainty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune_loader.twin.contention import BURST_SD, Contention, fit_contention
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.recursion import Floats, Ints

BEST = 3
"""Runs of the best fit per configuration, each with the batches in another order; their mean is the prediction."""
DRAWS = 9
"""Runs with drawn parameters per configuration; their spread makes the interval."""
EXTRAPOLATION_SD = 0.2
"""Further uncertainty of the service time per e-fold of busy workers beyond the most that a burst has seen."""
UNSEEN_THREADS_SD = 0.05
"""Further uncertainty of the step with a number of threads that no burst and no step ceiling has seen."""
PIN_BYTES_PER_S = 4e9
"""Copy into page-locked memory where no burst with pinning was seen; one core's memcpy."""
FIXED_POINT_ROUNDS = 30
SAME_BUSY = 1.05
"""Bursts whose busy workers differ by less than this factor are averaged, not interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """What is asked: one value per simulated column, each configuration BEST + DRAWS times."""

    workers: Ints
    prefetch: Ints
    ahead: Ints
    """Batches that the device prefetch receives ahead of the step."""
    in_order: NDArray[np.bool_]
    pinned: NDArray[np.bool_]
    step_threads: Floats
    step_s: Floats
    """Seconds of the undisturbed step."""
    step_sd: Floats
    """Relative uncertainty of `step_s` beyond what the bursts show."""
    cores: Floats
    draw: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """How busy everything is, per column."""

    busy: Floats
    """Workers at work while a batch is fetched, its own included; what `Observation.busy_workers` measures."""
    wanting: Floats
    """Those of them that want a CPU."""
    consumer: Floats
    """Share of the time in which the consumer works."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Mean seconds of each stage under a load, per column."""

    service_s: Floats
    receive_s: Floats
    step_s: Floats
    pin_s: Floats
    cpu_share: Floats
    """Share of the service time in which the worker wants a CPU."""
    crowding: Floats
    """Factor on the worker's CPU seconds since it has to share cores, caches and memory bandwidth."""

    def bound(self, columns: Columns) -> Floats:
        """Batches per second were every queue endless and every stage steady."""
        consumer_s = np.where(columns.ahead > 0, np.maximum(self.receive_s, self.step_s), self.receive_s + self.step_s)
        slowest = np.maximum(np.maximum(consumer_s, self.pin_s), self.service_s / np.maximum(columns.workers, 1))
        serial = self.service_s + self.receive_s + self.step_s
        rate: Floats = 1.0 / np.maximum(np.where(columns.workers == 0, serial, slowest), 1e-12)
        return rate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """Values at the loads that were seen; straight lines between them, flat beyond."""

    busy: Floats
    values: Floats
    """Shape (loads, draws)."""

    @classmethod
    def of(cls, busy: Sequence[float], values: Floats) -> Nodes:
        """Nodes at these loads, in any order; those at nearly the same load are averaged."""
        order = np.argsort(busy, kind="stable")
        groups: list[list[int]] = []
        for index in order:
            if groups and busy[index] <= busy[groups[-1][0]] * SAME_BUSY:
                groups[-1].append(int(index))
            else:
                groups.append([int(index)])
        return cls(
            busy=np.array([np.mean([busy[i] for i in group]) for group in groups]),
            values=np.array([values[group].mean(axis=0) for group in groups]),
        )

    def at(self, busy: Floats, draw: Ints) -> Floats:
        """The value at each column's load."""
        if len(self.busy) == 1:
            single: Floats = self.values[0, draw]
            return single
        right = np.clip(np.searchsorted(self.busy, busy), 1, len(self.busy) - 1)
        left = right - 1
        t = np.clip((busy - self.busy[left]) / (self.busy[right] - self.busy[left]), 0.0, 1.0)
        value: Floats = (1.0 - t) * self.values[left, draw] + t * self.values[right, draw]
        return value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """What the bursts taught. Built by `calibrate`."""

    contention: Contention
    service: Nodes
    """Logarithm of the seen service time over the contention model's."""
    step: Nodes
    """Logarithm of the seen step time over the undisturbed one on shared cores, over busy workers or, where the step
    computes on several cores, over `starved_threads`."""
    step_is_parallel: bool
    receive: Nodes
    """Seconds to take a ready batch over."""
    serial_service_s: Floats
    serial_receive_s: Floats
    pin_s: Floats
    hand_over_s: float
    """Seconds to take a pinned batch over; inf where none was seen."""
    luck: Floats
    """A standard normal value per draw, 0 for the best fit: scales the uncertainties that no burst can show."""

    def settle(self, columns: Columns, efficiency: Floats) -> tuple[Stages, Load]:
        """The fixed point of load -> stage times -> rate -> load, when the rate is `efficiency` times its bound."""
        fitted = self.contention.take(columns.draw)
        busy = np.maximum(columns.workers.astype(np.float64), 1.0)
        load = Load(busy=busy, wanting=busy * 0.5, consumer=np.full(len(busy), 0.5))
        for _ in range(FIXED_POINT_ROUNDS):
            stages = self.stages(columns, fitted, load)
            rate = efficiency * stages.bound(columns)
            seen = self._seen_by_a_batch(np.minimum(rate * stages.service_s, columns.workers), columns)
            consumer = np.minimum(rate * (stages.receive_s + stages.step_s), 1.0)
            # Half steps: full ones oscillate where the cores are just full.
            load = Load(
                busy=0.5 * (load.busy + seen),
                wanting=0.5 * (load.wanting + seen * stages.cpu_share),
                consumer=0.5 * (load.consumer + consumer),
            )
        return self.stages(columns, fitted, load), load

    def _seen_by_a_batch(self, at_work: Floats, columns: Columns) -> Floats:
        """Busy workers as a batch in service sees them: the mean, plus variance over mean as busy times serve more."""
        idle = 1.0 - at_work / np.maximum(columns.workers, 1)
        return np.maximum(at_work + self.contention.variability * idle, 1.0)

    def stages(self, columns: Columns, fitted: Contention, load: Load) -> Stages:
        """Stage times under a load; `fitted` is the contention, one value per column."""
        serial = columns.workers == 0
        luck = self.luck[columns.draw]
        cpu_wall = fitted.cpu_wall_s(
            load.wanting, columns.workers.astype(np.float64), load.consumer, columns.step_threads, columns.cores
        )
        waiting = fitted.waiting_s(load.busy)
        beyond = np.log(np.maximum(load.busy / self.service.busy[-1], 1.0))
        bend = np.exp(self.service.at(load.busy, columns.draw) + EXTRAPOLATION_SD * beyond * luck)
        crowd = np.where(serial, 0.0, load.wanting)
        shared = step_share(crowd, fitted.step_cores * columns.step_threads, columns.cores)
        disturbance = np.where(serial, 0.0, load.busy)
        if self.step_is_parallel:
            disturbance = starved_threads(crowd, columns.step_threads, columns.cores)
        step = np.exp(self.step.at(disturbance, columns.draw) + columns.step_sd * luck)
        receive = self.receive.at(load.busy, columns.draw)
        receive = np.where(columns.pinned, np.minimum(receive, self.hand_over_s), receive)
        return Stages(
            service_s=np.where(serial, self.serial_service_s[columns.draw], (cpu_wall + waiting) * bend),
            receive_s=np.where(serial, self.serial_receive_s[columns.draw], receive),
            step_s=columns.step_s * shared * step,
            pin_s=np.where(columns.pinned & ~serial, self.pin_s[columns.draw], 0.0),
            cpu_share=cpu_wall / np.maximum(cpu_wall + waiting, 1e-12),
            crowding=cpu_wall / fitted.cpu_s,
        )


def step_share(wanting: Floats, step_cores: Floats, cores: Floats) -> Floats:
    """Factor on the step's time because the workers want the same cores."""
    crowded = np.maximum((wanting + step_cores) / cores, 1.0)
    factor: Floats = crowded / np.maximum(step_cores / cores, 1.0)
    return factor


def starved_threads(wanting: Floats, threads: Floats, cores: Floats) -> Floats:
    """Threads of a parallel step that find no free core, weighted by how much the others wait for them.

    An intra-op region ends when its last thread does, so one thread without a core stalls all; a single thread waits for
    nobody. On 4 cores a 4-thread step took 24 ms alone and 80 ms beside four workers, a 1-thread step 55 and 56 ms.
    """
    starved: Floats = np.clip(wanting + threads - cores, 0.0, threads) * (1.0 - 1.0 / np.maximum(threads, 1.0))
    return starved


def calibrate(
    observations: Sequence[Observation],
    *,
    cores: float,
    threads_of: Callable[[int | None], float],
    step_base_s: Mapping[int | None, float],
    seed: int,
) -> Calibration:
    """What the bursts teach.

    Args:
        observations: one or more bursts.
        cores: usable cores.
        threads_of: the step's threads, from a configuration's `consumer_threads`.
        step_base_s: seconds of the undisturbed step by `consumer_threads`.
        seed: chooses the draws.
    """
    rng = np.random.default_rng(seed)
    fitted = [o for o in observations if o.num_workers > 0] or list(observations)
    threads = [threads_of(o.consumer_threads) for o in fitted]
    contention = fit_contention(fitted, threads, cores, best=BEST, draws=DRAWS, seed=seed)
    serial = [o for o in observations if o.num_workers == 0]
    unpinned = [o for o in fitted if not o.pin_memory] or fitted
    pinned = [o for o in fitted if o.pin_memory and o.pin_s is not None]
    receive = np.array([_noisy(o.receive_s, rng) for o in unpinned])
    step_is_parallel = max(threads_of(threads) for threads in step_base_s) > 1
    return Calibration(
        contention=contention,
        service=Nodes.of([_busy(o) for o in fitted], _service_bends(fitted, threads, contention, cores, rng)),
        step=Nodes.of(
            [_disturbance(o, threads_of, contention, cores, step_is_parallel) for o in observations],
            np.array([_step_bend(o, threads_of, step_base_s, contention, cores, rng) for o in observations]),
        ),
        step_is_parallel=step_is_parallel,
        receive=Nodes.of([_busy(o) for o in unpinned], receive),
        serial_service_s=_serial(serial, "service_s", contention.cpu_s + contention.wait_s, rng),
        serial_receive_s=_serial(serial, "receive_s", np.zeros(BEST + DRAWS), rng),
        pin_s=_pin_seconds(pinned, observations, receive.mean(axis=0)),
        hand_over_s=min((float(o.receive_s.mean()) for o in fitted if o.pin_memory), default=np.inf),
        luck=_luck(rng),
    )


def _busy(observation: Observation) -> float:
    return max(1.0, observation.busy_workers)


def _luck(rng: np.random.Generator) -> Floats:
    """Evenly spread normal values, so that so few draws still show the whole spread."""
    spread = np.sqrt(2.0) * np.array([_inverse_erf(2 * (i + 0.5) / DRAWS - 1) for i in range(DRAWS)])
    return np.concatenate([np.zeros(BEST), rng.permutation(spread)])


def _inverse_erf(x: float) -> float:
    # Winitzki's approximation, exact to 0.2 %: enough for a spread, and no scipy.
    log = np.log(1.0 - x * x)
    half = 2.0 / (np.pi * 0.147) + log / 2.0
    return float(np.sign(x) * np.sqrt(np.sqrt(half * half - log / 0.147) - half))


def _noisy(samples: Floats, rng: np.random.Generator) -> Floats:
    """The mean once per draw, with a burst's uncertainty on all but the best fit."""
    mean = float(samples.mean())
    spread = float(samples.std()) / mean / np.sqrt(len(samples)) if mean > 0 else 0.0
    values: Floats = mean * np.exp(np.hypot(BURST_SD, spread) * _luck(rng))
    return values


def _service_bends(
    fitted: Sequence[Observation],
    threads: Sequence[float],
    contention: Contention,
    cores: float,
    rng: np.random.Generator,
) -> Floats:
    bends = []
    for seen, step_threads in zip(fitted, threads, strict=True):
        busy = np.full(BEST + DRAWS, _busy(seen))
        waiting = contention.waiting_s(busy)
        wanting = busy * wanted_share(seen, float(waiting[0]))
        workers = np.full_like(busy, seen.num_workers)
        consumer = np.full_like(busy, seen.consumer_share)
        model = contention.cpu_wall_s(wanting, workers, consumer, np.asarray(step_threads), np.asarray(cores)) + waiting
        bends.append(np.log(np.maximum(_noisy(seen.service_s, rng), 1e-12) / np.maximum(model, 1e-12)))
    return np.array(bends)


def wanted_share(seen: Observation, waiting_s: float) -> float:
    """Share of the burst's service time in which a worker ran or wanted to."""
    wall, cpu = float(seen.service_s.mean()), float(seen.cpu_s.mean())
    if wall <= 0:
        return 1.0
    return float(np.clip((wall - waiting_s) / wall, min(cpu / wall, 1.0), 1.0))


def _disturbance(
    seen: Observation,
    threads_of: Callable[[int | None], float],
    contention: Contention,
    cores: float,
    step_is_parallel: bool,
) -> float:
    """Where a burst lies on the axis of `Calibration.step`."""
    if not step_is_parallel:
        return seen.busy_workers
    wanting = np.asarray(seen.busy_workers * wanted_share(seen, float(contention.wait_s[0])))
    return float(starved_threads(wanting, np.asarray(threads_of(seen.consumer_threads)), np.asarray(cores)))


def _step_bend(
    seen: Observation,
    threads_of: Callable[[int | None], float],
    step_base_s: Mapping[int | None, float],
    contention: Contention,
    cores: float,
    rng: np.random.Generator,
) -> Floats:
    wanting = np.asarray(seen.busy_workers * wanted_share(seen, float(contention.wait_s[0])))
    shared = step_share(wanting, contention.step_cores * threads_of(seen.consumer_threads), np.asarray(cores))
    bend: Floats = np.log(
        np.maximum(_noisy(seen.step_s, rng), 1e-12) / np.maximum(step_base_s[seen.consumer_threads] * shared, 1e-12)
    )
    return bend


def _serial(serial: Sequence[Observation], stage: str, otherwise: Floats, rng: np.random.Generator) -> Floats:
    if not serial:
        return otherwise
    values: Floats = np.mean([_noisy(getattr(o, stage), rng) for o in serial], axis=0)
    return values


def _pin_seconds(pinned: Sequence[Observation], observations: Sequence[Observation], receive_s: Floats) -> Floats:
    if pinned:
        return np.full(BEST + DRAWS, np.mean([o.pin_s for o in pinned]))
    # The pinning thread also does what the training loop otherwise does: it rebuilds the batch from shared memory.
    return receive_s + max(o.batch_bytes for o in observations) / PIN_BYTES_PER_S
