"""All that the bursts taught, and the fixed point that turns it into the stage times of any configuration.

The contention model gives the shape between and beyond the bursts; the *nodes* bend it so that it passes through each of
them (`calibrate`). Every fitted value is an array over draws: the first `BEST` are the best fit, the others draws from its
uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune_loader.twin.contention import BURST_SD, Contention, busy_beside, fit_contention
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import BEST, DRAWS, Floats, Ints
from autotune_loader.twin.smoothing import noise_sd, sampling_variance, smooth_by_kind
from autotune_loader.twin.stages import Columns, Load, Stages, starved_threads, step_share

EXTRAPOLATION_SD = 0.2
"""Further uncertainty of the service time per e-fold of busy workers beyond the most that a burst has seen."""
MACHINE_SPEED_SD = 0.06
"""Relative sd of CPU seconds for the same work between one minute and another: 6.3 % over 25 minutes on a quiet virtual
machine with 4 cores (studies/fidelity). All that computes shares it, so no number of batches shows it."""
FIXED_POINT_ROUNDS = 30
"""Each goes half of the way to the load that follows from it: 1e-9 of the way is left."""
SAME_BUSY = 1.05
"""Bursts whose busy workers differ by less than this factor are averaged, not interpolated."""
SAME_WORKERS = 0.25
"""Or by less than this part of a worker: so little does not explain why one burst was slower than another."""
ALONE = -1e6
"""Where a burst without workers lies on the axis of `Calibration.step`: far from all with workers, however idle."""


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
            first = busy[groups[-1][0]] if groups else -np.inf
            if busy[index] <= max(first * SAME_BUSY, first + SAME_WORKERS):
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
    """What the bursts taught. Built by `fitting.calibrate`."""

    contention: Contention
    noise_sd: float
    """Relative standard deviation between bursts of one configuration, as the bursts show it."""
    service: Nodes
    """Logarithm of the seen service time over the contention model's."""
    step: Nodes
    """Logarithm of the seen step time over the undisturbed one on shared cores, over busy workers or, where the step
    computes on several cores, over `starved_threads`."""
    step_by_threads: Nodes
    """How far that logarithm lies off the curve beside workers, over the threads of the step."""
    step_is_parallel: bool
    receive: Nodes
    """Seconds to take a ready batch over."""
    transit_s: float
    """Seconds that a whole batch travels before a training loop that waits for it can begin to take it over."""
    serial_service_s: Floats
    serial_receive_s: Floats
    pin_s: Floats
    hand_over_s: float
    """Seconds to take a pinned batch over; inf where none was seen."""
    luck: Floats
    """A standard normal value per draw, 0 for the best fit: scales the uncertainties that no burst can show."""
    speed: Floats
    """Factor on CPU seconds per draw, 1 for the best fit: the machine may be slower later than it was in the bursts."""

    def settle(self, columns: Columns, efficiency: Floats) -> tuple[Stages, Load]:
        """The fixed point of load -> stage times -> rate -> load, when the rate is `efficiency` times its bound."""
        fitted = self.contention.take(columns.draw)
        busy = np.maximum(columns.workers.astype(np.float64), 1.0)
        load = Load(at_work=busy, busy=busy, wanting=busy * 0.5, consumer=np.full(len(busy), 0.5))
        for _ in range(FIXED_POINT_ROUNDS):
            stages = self.stages(columns, fitted, load)
            rate = efficiency * stages.bound(columns)
            at_work = np.minimum(rate * stages.service_s, columns.workers)
            seen = busy_beside(at_work, columns.workers.astype(np.float64), self.contention.variability)
            consumer = np.minimum(rate * (stages.receive_s + stages.step_s), 1.0)
            wanting = seen * stages.cpu_share
            load = load.halfway(to=Load(at_work=at_work, busy=seen, wanting=wanting, consumer=consumer))
        return self.stages(columns, fitted, load), load

    def stages(self, columns: Columns, fitted: Contention, load: Load) -> Stages:
        """Stage times under a load; `fitted` is the contention, one value per column."""
        serial = columns.workers == 0
        luck, speed = self.luck[columns.draw], self.speed[columns.draw]
        cpu_wall = fitted.cpu_wall_s(
            load.wanting, columns.workers.astype(np.float64), load.consumer, columns.step_threads, columns.cores
        )
        waiting = fitted.waiting_s(load.busy)
        beyond = np.log(np.maximum(load.at_work / np.maximum(self.service.busy[-1], 1.0), 1.0))
        bend = np.exp(self.service.at(load.at_work, columns.draw) + EXTRAPOLATION_SD * beyond * luck)
        crowd = np.where(serial, 0.0, load.wanting)
        shared = step_share(crowd, fitted.step_cores * columns.step_threads, columns.cores)
        disturbance = load.at_work
        if self.step_is_parallel:
            disturbance = starved_threads(crowd, columns.step_threads, columns.cores)
        disturbance = np.where(serial, ALONE, disturbance)
        off = np.where(serial, 0.0, self.step_by_threads.at(columns.step_threads, columns.draw))
        step = np.exp(self.step.at(disturbance, columns.draw) + off + columns.step_sd * luck)
        receive = self.receive.at(load.at_work, columns.draw) * speed
        cpu_share = cpu_wall / np.maximum(cpu_wall + waiting, 1e-12)
        receive = np.where(columns.pinned, np.minimum(receive, self.hand_over_s), receive)
        return Stages(
            service_s=np.where(serial, self.serial_service_s[columns.draw], (cpu_wall + waiting) * bend)
            * (1.0 + cpu_share * (speed - 1.0)),
            receive_s=np.where(serial, self.serial_receive_s[columns.draw], receive),
            step_s=columns.step_s * shared * step * (speed if self.step_is_parallel else 1.0),
            pin_s=np.where(columns.pinned & ~serial, self.pin_s[columns.draw], 0.0),
            transit_s=np.where(serial | columns.pinned, 0.0, self.transit_s),
            cpu_share=cpu_share,
            crowding=cpu_wall / fitted.cpu_s,
        )


PIN_BYTES_PER_S = 4e9
"""Copy into page-locked memory where no burst with pinning was seen; one core's memcpy."""
PINNED_COPY_SHARE = 0.5
"""Of the seconds of a copy to the device that one from page-locked memory takes, where none was seen: it saves the host's own
copy into a staging buffer. A guess, on the side of trying it."""
LEAST_WAITED = 0.05
"""Quantile of the receive times that stands for a batch that was ready, where the loop waited for all."""


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
    ready = [o for o in unpinned if o.saw_ready] or unpinned
    receive = np.array([_noisy(_receive(o), rng) for o in ready])
    step_is_parallel = max(threads_of(threads) for threads in step_base_s) > 1
    at_work = np.array([o.workers_at_work for o in fitted])
    bends = _service_bends(fitted, threads, contention, cores, rng)
    sampling = sampling_variance(fitted)
    noise = noise_sd(np.log(np.maximum(at_work, 1.0)), bends[:, 0], sampling)
    disturbances = [_disturbance(o, threads_of, contention, cores, step_is_parallel) for o in observations]
    step_bends = np.array([_step_bend(o, threads_of, step_base_s, contention, cores, rng) for o in observations])
    is_fitted = [o in fitted for o in observations]
    kinds = np.full(len(observations), math.nan)
    if step_is_parallel:
        kinds[is_fitted] = threads
    step, off = smooth_by_kind(_step_axis(disturbances), kinds, step_bends, np.full(len(observations), noise**2))
    return Calibration(
        contention=contention,
        noise_sd=noise,
        service=Nodes.of(list(at_work), bends),
        step=Nodes.of(disturbances, step),
        step_by_threads=Nodes.of(threads, off[is_fitted]),
        step_is_parallel=step_is_parallel,
        receive=Nodes.of([o.workers_at_work for o in ready], receive),
        transit_s=_transit(unpinned, receive),
        serial_service_s=_serial(serial, "service_s", contention.cpu_s + contention.wait_s, rng),
        serial_receive_s=_serial(serial, "receive_s", np.zeros(BEST + DRAWS), rng),
        pin_s=_pin_seconds(pinned, observations, receive.mean(axis=0)),
        hand_over_s=_hand_over_s(fitted, float(receive.mean(axis=0)[0])),
        luck=_luck(rng),
        speed=np.exp(MACHINE_SPEED_SD * _luck(rng)),
    )


def _step_axis(disturbances: Sequence[float]) -> Floats:
    """Disturbances in e-folds, with the lone main process as far from all others as it is in `Nodes`."""
    placed: Floats = np.where(np.array(disturbances) <= ALONE, ALONE, np.log1p(np.maximum(disturbances, 0.0)))
    return placed


def _receive(seen: Observation) -> Floats:
    """Receive times as of ready batches: where the loop waited for every one, the least of them hold hardly any waiting."""
    if seen.saw_ready:
        return seen.receive_s
    return np.minimum(seen.receive_s, np.quantile(seen.receive_s, LEAST_WAITED))


def _transit(unpinned: Sequence[Observation], receive: Floats) -> float:
    waited = [seen.waited_s for seen in unpinned if seen.waited_s is not None]
    return max(0.0, float(np.mean(waited)) - float(receive[:, 0].mean())) if waited else 0.0


def _busy(seen: Observation, contention: Contention) -> float:
    """Busy workers as the fixed point will reckon them, so that it comes out at the burst."""
    at_work, workers = np.asarray(seen.workers_at_work), np.asarray(float(seen.num_workers))
    return float(busy_beside(at_work, workers, contention.variability))


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
        busy = np.full(BEST + DRAWS, _busy(seen, contention))
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


def _wanting(seen: Observation, contention: Contention) -> Floats:
    """Workers that wanted a CPU during a burst."""
    share = wanted_share(seen, float(contention.wait_s[0]))
    return np.asarray(_busy(seen, contention) * (seen.num_workers > 0) * share)


def _disturbance(
    seen: Observation,
    threads_of: Callable[[int | None], float],
    contention: Contention,
    cores: float,
    step_is_parallel: bool,
) -> float:
    """Where a burst lies on the axis of `Calibration.step`."""
    if seen.num_workers == 0:
        return ALONE
    if not step_is_parallel:
        return seen.workers_at_work
    wanting = _wanting(seen, contention)
    return float(starved_threads(wanting, np.asarray(threads_of(seen.consumer_threads)), np.asarray(cores)))


def _step_bend(
    seen: Observation,
    threads_of: Callable[[int | None], float],
    step_base_s: Mapping[int | None, float],
    contention: Contention,
    cores: float,
    rng: np.random.Generator,
) -> Floats:
    wanting = _wanting(seen, contention)
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
    # The pinning thread also does what the training loop otherwise does: it rebuilds the batch from shared memory. The copy
    # to the device stays with the loop.
    rebuilt_s = np.maximum(receive_s - max(o.copy_s for o in observations), 0.0)
    return rebuilt_s + max(o.batch_bytes for o in observations) / PIN_BYTES_PER_S


def _hand_over_s(fitted: Sequence[Observation], receive_s: float) -> float:
    """Seconds in which the loop takes a pinned batch over, its copy to the device included."""
    copy_s = min((o.copy_s for o in fitted if not o.pin_memory), default=0.0)
    unseen = receive_s - copy_s * (1.0 - PINNED_COPY_SHARE) if copy_s else np.inf
    return min((float(o.receive_s.mean()) for o in fitted if o.pin_memory), default=float(unseen))
