"""The twin: predicts the rate of every configuration from a few traced bursts. Pure maths, no processes.

Service stretches by `contention`. The step is slowed by workers beside it, and receiving by those at work: both by a
line through the logarithms that the bursts show, held back by how far such lines usually go. A fixed point turns load
into stage times and stage times into load; `queue` turns stage times into rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune_loader.search.contention import Contention, fit_contention, sampling_sd
from autotune_loader.search.observation import Observation, whole_cycles
from autotune_loader.search.queue import Floats, Ints, batches_needed, quantile_order, relative, simulate, steady_rate
from autotune_loader.search.rule import useful_workers
from autotune_loader.search.space import Context
from autotune_loader.values import LoaderConfig

FIXED_POINT_ROUNDS = 30
"""Each goes half of the way to the load that follows from it: 1e-9 of the way is left."""
LEVEL_SD, SLOPE_SD = 0.3, 0.3
"""How far a stage beside workers lies off the same stage alone, and by how much more per e-fold of disturbance (log)."""
STEADY_BATCHES, MOST_STEADY_BATCHES = 256, 1500
"""Batches in the window of a steady rate; more where batches differ much: which worker the slow ones fall to is luck that a
longer run evens out."""
LIGHT_VARIATION, HEAVY_ORDERS = 0.4, 3
"""Standard deviation over mean of service times up to which `STEADY_BATCHES` are enough; beyond it, orders of the batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The logarithm of a factor as a line over the logarithm of 1 + some disturbance."""

    level: float
    slope: float
    least: float = 0.0
    """Least disturbance that was seen where the line falls: below, it is not continued."""

    def at(self, disturbance: Floats) -> Floats:
        """The factor."""
        factor: Floats = np.exp(self.level + self.slope * np.log1p(np.maximum(disturbance, self.least)))
        return factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Mean seconds of each stage under a load: one value per configuration."""

    workers: Ints
    service_s: Floats
    receive_s: Floats
    step_s: Floats
    cpu_share: Floats
    """Share of the service time in which a worker wants a CPU."""

    @property
    def loop_s(self) -> Floats:
        """Seconds between two batches that receipt and step allow."""
        return self.receive_s + self.step_s

    @property
    def headroom(self) -> Floats:
        """How many times what the loop can take the workers could deliver; 0 without workers."""
        times: Floats = self.workers * (self.loop_s / np.maximum(self.service_s, 1e-12))
        return times

    @property
    def bound(self) -> Floats:
        """Batches per second were every queue endless and every stage steady."""
        slowest = np.maximum(self.loop_s, self.service_s / np.maximum(self.workers, 1))
        rate: Floats = 1.0 / np.maximum(np.where(self.workers == 0, self.service_s + self.loop_s, slowest), 1e-12)
        return rate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """What the twin says of some configurations, one value each."""

    samples_per_s: Floats
    loop_use: Floats
    """Share of the time in which the training loop receives or steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Twin:
    """Predicts every DataLoader configuration on the machine and workload of its bursts. Built by `Twin.fit`."""

    observations: tuple[Observation, ...]
    context: Context
    step_alone_s: float
    """Seconds of the undisturbed step."""
    contention: Contention
    step: Trend
    """Factor on a step beside workers and shared cores, over workers at work or, of a parallel step, its starved threads."""
    serial_step: float
    """The same without workers."""
    receive: Trend
    """Seconds to take a ready batch over, over the workers at work."""
    serial_service_s: float
    serial_receive_s: float

    @classmethod
    def fit(cls, observations: Sequence[Observation], context: Context) -> Twin:
        """The twin of the machine that the bursts ran on.

        Args:
            observations: traced bursts; best at 0 workers, at 1 or 2, and at as many as there are cores.
            context: cores and step.

        Raises:
            ValueError: there are no observations.
        """
        if not observations:
            raise ValueError("the twin needs at least one observation, such as a burst with one worker")
        observations = whole_cycles(observations)
        least_busy = min(observations, key=lambda o: o.workers_at_work)
        alone_s = max(context.step_s or float(least_busy.step_s.mean()), 1e-12)
        serial = [o for o in observations if o.num_workers == 0]
        fitted = [o for o in observations if o.num_workers > 0] or list(observations)
        contention = fit_contention(fitted, context)
        receive_s = np.maximum([o.receive_s.mean() for o in fitted], 1e-9)
        typical_s = float(np.exp(np.log(receive_s).mean()))
        receive = _line(
            [o.workers_at_work for o in fitted], np.log(receive_s / typical_s), sampling_sd(fitted, "receive_s")
        )
        serial_steps = [float(o.step_s.mean()) / alone_s for o in serial]
        return cls(
            observations=observations,
            context=context,
            step_alone_s=alone_s,
            contention=contention,
            step=_step_line(fitted, contention, context, alone_s),
            serial_step=float(np.mean(serial_steps)) if serial else 1.0,
            receive=Trend(level=math.log(typical_s) + receive.level, slope=receive.slope),
            serial_service_s=_mean(serial, "service_s", contention.cpu_s + contention.wait_s),
            serial_receive_s=_mean(serial, "receive_s", 0.0),
        )

    def predict(self, configs: Sequence[LoaderConfig], cores: float | None = None) -> Solved:
        """What to expect of each configuration in the midst of training; what is not modelled (pinning, order) is ignored.

        Stage times, load and rate follow from each other by turns: idle workers slow nobody, and who idles follows from
        the rate.
        """
        cores = cores or float(self.context.usable_cores)
        workers = np.array([c.num_workers for c in configs], dtype=np.int64)
        prefetch = np.array([c.prefetch_factor or 1 for c in configs], dtype=np.int64)
        variation = float(self.services.std())
        batches = round(
            min(max(STEADY_BATCHES * (variation / LIGHT_VARIATION) ** 2, STEADY_BATCHES), MOST_STEADY_BATCHES)
        )
        rng, count = np.random.default_rng(0), batches_needed(workers, batches)
        steps = np.concatenate([relative(o.step_s) for o in self.observations])
        orders = [
            (quantile_order(self.services, count, rng)[:, None], quantile_order(steps, count, rng)[:, None])
            for _ in range(1 if variation < LIGHT_VARIATION else HEAVY_ORDERS)
        ]
        efficiency = np.ones(len(workers))
        for _ in range(2):
            stages = self._settled(workers, efficiency, cores)
            # Workers that keep up with the loop have long filled their queues. From empty ones those with 4% to spare take
            # 25 rounds for each batch ahead. With heavy tails they fall behind again before the queues are full.
            full = workers * prefetch * (variation < LIGHT_VARIATION) * (stages.headroom >= 1.0)
            made = np.arange(count)[:, None] < full
            rates = []
            for service, step in orders:
                times = np.where(made, 0.0, service * stages.service_s), stages.receive_s, step * stages.step_s
                rates.append(steady_rate(simulate(*times, workers=workers, prefetch=prefetch), workers, batches))
            rate = np.mean(rates, axis=0)
            efficiency = np.minimum(rate / stages.bound, 1.0)
        return Solved(
            samples_per_s=rate * np.mean([o.batch_size for o in self.observations]),
            loop_use=np.minimum(rate * stages.loop_s, 1.0),
        )

    @property
    def useful_workers(self) -> int:
        """Workers beyond which none could possibly help, as the undisturbed stages say."""
        fetching, receive_s = self.contention, float(self.receive.at(np.array([1.0]))[0])
        return useful_workers(
            fetch_s=fetching.cpu_s + fetching.wait_s,
            fetch_cpu_s=fetching.cpu_s,
            loop_s=receive_s + self.step_alone_s,
            cores=float(self.context.usable_cores),
        )

    @cached_property
    def services(self) -> Floats:
        """Service times of all bursts with workers, relative to the mean of each."""
        with_workers = [o for o in self.observations if o.num_workers > 0] or list(self.observations)
        return np.concatenate([relative(o.service_s) for o in with_workers])

    def _settled(self, workers: Ints, efficiency: Floats, cores: float) -> Stages:
        """Stage times at the fixed point of load -> stage times -> rate -> load.

        Each round goes half of the way: full steps oscillate where the cores are just full.
        """
        at_work = np.maximum(workers.astype(np.float64), 1.0)
        wanting, step_busy = at_work * 0.5, np.full(len(workers), 0.5)
        for _ in range(FIXED_POINT_ROUNDS):
            stages = self._stages(workers, at_work, wanting, step_busy, cores)
            rate = efficiency * stages.bound
            busy = np.minimum(rate * stages.service_s, workers)
            at_work = 0.5 * (at_work + busy)
            wanting = 0.5 * (wanting + np.maximum(busy, 1.0) * stages.cpu_share)
            step_busy = 0.5 * (step_busy + np.minimum(rate * stages.loop_s, 1.0))
        return self._stages(workers, at_work, wanting, step_busy, cores)

    def _stages(self, workers: Ints, at_work: Floats, wanting: Floats, step_busy: Floats, cores: float) -> Stages:
        """Stage times under a load."""
        serial, fitted, threads = workers == 0, self.contention, self.context.step_cores
        cpu_wall = fitted.computing_s(wanting, step_busy, self.context, cores)
        beside = np.where(serial, 0.0, wanting)
        slowed = _step_share(beside, threads, cores)
        slowed = slowed * self.step.at(_starved(beside, threads, cores) if threads > 1 else at_work)
        return Stages(
            workers=workers,
            service_s=np.where(serial, self.serial_service_s, cpu_wall + fitted.wait_s),
            receive_s=np.where(serial, self.serial_receive_s, self.receive.at(at_work)),
            step_s=self.step_alone_s * np.where(serial, self.serial_step, slowed),
            cpu_share=cpu_wall / np.maximum(cpu_wall + fitted.wait_s, 1e-12),
        )


def _step_line(fitted: Sequence[Observation], contention: Contention, context: Context, alone_s: float) -> Trend:
    """How workers slow the step, beside taking cores from it."""
    cores, threads = float(context.usable_cores), context.step_cores
    wanting = np.array([_wanting(o, contention) for o in fitted])
    beside = np.array([o.num_workers > 0 for o in fitted])
    at_work = np.array([o.workers_at_work for o in fitted])
    disturbance = _starved(wanting, threads, cores) if threads > 1 else at_work
    shared = alone_s * _step_share(wanting, threads, cores)
    off = np.log(np.maximum([o.step_s.mean() for o in fitted], 1e-12) / shared)
    return _line(disturbance[beside], off[beside], sampling_sd(fitted, "step_s")[beside])


def _line(disturbance: Sequence[float] | Floats, values: Floats, noise_sd: Floats) -> Trend:
    """Level and slope: linear regression with normal priors around none of either."""
    if not len(values):
        return Trend(level=0.0, slope=0.0)
    features = np.stack([np.ones(len(values)), np.log1p(disturbance)], axis=1)
    weighted = features.T / noise_sd**2
    priors = np.diag([LEVEL_SD**-2, SLOPE_SD**-2])
    level, slope = np.linalg.solve(weighted @ features + priors, weighted @ values)
    return Trend(level=float(level), slope=float(slope), least=float(min(disturbance)) if slope < 0 else 0.0)


def _wanting(seen: Observation, contention: Contention) -> float:
    """Workers that ran or wanted to run during a burst."""
    wall, cpu = float(seen.service_s.mean()), float(seen.cpu_s.mean())
    if not seen.num_workers or wall <= 0:
        return float(seen.num_workers > 0)
    share = np.clip((wall - contention.wait_s) / wall, min(cpu / wall, 1.0), 1.0)
    return max(seen.workers_at_work, 1.0) * float(share)


def _mean(serial: Sequence[Observation], stage: str, otherwise: float) -> float:
    return float(np.mean([getattr(o, stage).mean() for o in serial])) if serial else otherwise


def _step_share(wanting: Floats, step_cores: float, cores: float) -> Floats:
    """Factor on the step's time because the workers want the same cores."""
    factor: Floats = np.maximum((wanting + step_cores) / cores, 1.0) / max(step_cores / cores, 1.0)
    return factor


def _starved(wanting: Floats, threads: float, cores: float) -> Floats:
    """Threads of a parallel step that find no free core, weighted by how much the others wait for them.

    An intra-op region ends when its last thread does, so one thread without a core stalls all; a single thread waits for
    nobody. On 4 cores a 4-thread step took 24 ms alone and 80 ms beside four workers, a 1-thread step 55 and 56 ms.
    """
    starved: Floats = np.clip(wanting + threads - cores, 0.0, threads) * (1.0 - 1.0 / max(threads, 1.0))
    return starved
