"""All that the bursts taught, and the fixed point that turns it into the stage times of any configuration.

Fetching stretches by `contention`. The step is slowed by workers beside it, and receiving by those at work: both by
a line through the logarithms that the bursts show, held back by how far such lines usually go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune_loader.twin.contention import Contention, fit_contention, sampling_sd
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import Floats
from autotune_loader.twin.stages import Columns, Load, Stages, starved_threads, step_share

FIXED_POINT_ROUNDS = 30
"""Each goes half of the way to the load that follows from it: 1e-9 of the way is left."""
LEVEL_SD, SLOPE_SD = 0.3, 0.3
"""How far a stage beside workers lies off the same stage alone, and by how much more per e-fold of disturbance (log)."""
OFFSET_SD = 0.1
"""How far the step of one number of threads lies off that of others (log)."""
PIN_BYTES_PER_S = 4e9
"""Copy into page-locked memory where no burst with pinning was seen; one core's memcpy."""
PINNED_COPY_SHARE = 0.5
"""Of the seconds of a copy to the device that one from page-locked memory takes, where none was seen: it saves the host's own
copy into a staging buffer. A guess, on the side of trying it."""
LEAST_WAITED = 0.05
"""Quantile of the receive times that stands for a batch that was ready, where the loop waited for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The logarithm of a factor as a line over the logarithm of 1 + some disturbance."""

    level: float
    slope: float

    def at(self, disturbance: Floats) -> Floats:
        """The factor."""
        factor: Floats = np.exp(self.level + self.slope * np.log1p(np.maximum(disturbance, 0.0)))
        return factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """What the bursts taught. Built by `calibrate`."""

    contention: Contention
    step: Line
    """Factor on a step beside workers and shared cores, over workers at work or, of a parallel step, its starved threads."""
    step_alone: float
    """The same without workers."""
    step_off: Mapping[float, float]
    """Logarithm by which steps of so many threads lie off that line."""
    step_is_parallel: bool
    receive: Line
    """Seconds to take a ready batch over, over the workers at work."""
    transit_s: float
    """Seconds that a whole batch travels before a training loop that waits for it can begin to take it over."""
    serial_service_s: float
    serial_receive_s: float
    pin_s: float
    hand_over_s: float
    """Seconds to take a pinned batch over; inf where none was seen."""

    def settle(self, columns: Columns, efficiency: Floats) -> tuple[Stages, Load]:
        """The fixed point of load -> stage times -> rate -> load, when the rate is `efficiency` times its bound."""
        at_work = np.maximum(columns.workers.astype(np.float64), 1.0)
        load = Load(at_work=at_work, wanting=at_work * 0.5, consumer=np.full(len(at_work), 0.5))
        for _ in range(FIXED_POINT_ROUNDS):
            stages = self.stages(columns, load)
            rate = efficiency * stages.bound(columns)
            at_work = np.minimum(rate * stages.service_s, columns.workers)
            consumer = np.minimum(rate * (stages.receive_s + stages.step_s), 1.0)
            wanting = np.maximum(at_work, 1.0) * stages.cpu_share
            load = load.halfway(to=Load(at_work=at_work, wanting=wanting, consumer=consumer))
        return self.stages(columns, load), load

    def stages(self, columns: Columns, load: Load) -> Stages:
        """Stage times under a load."""
        serial, fitted = columns.workers == 0, self.contention
        cpu_wall = fitted.cpu_wall_s(load.wanting, load.consumer, columns.step_threads, columns.cores)
        waiting = fitted.waiting_s(load.at_work)
        crowd = np.where(serial, 0.0, load.wanting)
        shared = step_share(crowd, fitted.step_cores * columns.step_threads, columns.cores)
        disturbance = load.at_work
        if self.step_is_parallel:
            disturbance = starved_threads(crowd, columns.step_threads, columns.cores)
        beside = self.step.at(disturbance) * np.exp(columns.step_off)
        receive = self.receive.at(load.at_work)
        return Stages(
            service_s=np.where(serial, self.serial_service_s, cpu_wall + waiting),
            receive_s=np.where(
                serial,
                self.serial_receive_s,
                np.where(columns.pinned, np.minimum(receive, self.hand_over_s), receive),
            ),
            step_s=columns.step_s * np.where(serial, self.step_alone, shared * beside),
            pin_s=np.where(columns.pinned & ~serial, self.pin_s, 0.0),
            transit_s=np.where(serial | columns.pinned, 0.0, self.transit_s),
            cpu_share=cpu_wall / np.maximum(cpu_wall + waiting, 1e-12),
        )


def calibrate(
    observations: Sequence[Observation],
    *,
    cores: float,
    threads_of: Callable[[int | None], float],
    step_base_s: Mapping[int | None, float],
) -> Calibration:
    """What the bursts teach.

    Args:
        observations: one or more bursts.
        cores: usable cores.
        threads_of: the step's threads, from a configuration's `consumer_threads`.
        step_base_s: seconds of the undisturbed step by `consumer_threads`.
    """
    serial = [o for o in observations if o.num_workers == 0]
    fitted = [o for o in observations if o.num_workers > 0] or list(observations)
    threads = [threads_of(o.consumer_threads) for o in fitted]
    contention = fit_contention(fitted, threads, cores)
    unpinned = [o for o in fitted if not o.pin_memory] or fitted
    ready = [o for o in unpinned if o.saw_ready] or unpinned
    receive_s = np.array([_receive(o) for o in ready])
    typical_s = float(np.exp(np.log(np.maximum(receive_s, 1e-9)).mean()))
    off = np.log(np.maximum(receive_s, 1e-9) / typical_s)
    level, slope = _fitted(np.log1p([o.workers_at_work for o in ready]), off, sampling_sd(ready))
    step_is_parallel = max(map(threads_of, step_base_s)) > 1
    step, step_off = _step(fitted, threads, contention, cores, step_base_s, step_is_parallel)
    alone = [float(o.step_s.mean()) / max(step_base_s[o.consumer_threads], 1e-12) for o in serial]
    waited = [o.waited_s for o in unpinned if o.waited_s is not None]
    return Calibration(
        contention=contention,
        step=step,
        step_alone=float(np.mean(alone)) if alone else 1.0,
        step_off=step_off,
        step_is_parallel=step_is_parallel,
        receive=Line(level=math.log(typical_s) + level, slope=slope),
        transit_s=max(0.0, float(np.mean(waited)) - float(receive_s.mean())) if waited else 0.0,
        serial_service_s=_mean(serial, "service_s", contention.cpu_s + contention.wait_s),
        serial_receive_s=_mean(serial, "receive_s", 0.0),
        pin_s=_pin_seconds(fitted, observations, typical_s),
        hand_over_s=_hand_over_s(fitted, typical_s),
    )


def _step(
    fitted: Sequence[Observation],
    threads: Sequence[float],
    contention: Contention,
    cores: float,
    step_base_s: Mapping[int | None, float],
    step_is_parallel: bool,
) -> tuple[Line, dict[float, float]]:
    """How workers slow the step: the line, and how far steps of each number of threads lie off it."""
    at_work = np.array([o.workers_at_work for o in fitted])
    wanting = np.array([_wanting(o, contention) for o in fitted])
    beside = np.array([o.num_workers > 0 for o in fitted])
    shared = step_share(wanting, contention.step_cores * np.array(threads), cores)
    disturbance = starved_threads(wanting, np.array(threads), cores) if step_is_parallel else at_work
    base = np.array([step_base_s[o.consumer_threads] for o in fitted]) * shared
    off = np.log(np.maximum([o.step_s.mean() for o in fitted], 1e-12) / np.maximum(base, 1e-12))
    kinds = sorted(set(threads)) if step_is_parallel else []
    of_kind = np.array([[each == kind for kind in kinds] for each in threads], dtype=np.float64)
    found = _fitted(np.log1p(disturbance[beside]), off[beside], sampling_sd(fitted)[beside], of_kind[beside])
    return Line(level=found[0], slope=found[1]), dict(zip(kinds, found[2:], strict=True))


def _fitted(disturbance: Floats, values: Floats, noise_sd: Floats, of_kind: Floats | None = None) -> list[float]:
    """Level, slope and an offset of each kind: linear regression with normal priors around none of them.

    Args:
        disturbance: shape (n,).
        values: logarithms, shape (n,).
        noise_sd: of each value.
        of_kind: 1 where a value is of a kind, shape (n, kinds).
    """
    of_kind = np.zeros((len(values), 0)) if of_kind is None else of_kind
    features = np.hstack([np.ones((len(values), 1)), disturbance[:, None], of_kind])
    priors = np.array([LEVEL_SD, SLOPE_SD, *[OFFSET_SD] * of_kind.shape[1]])
    weighted = features.T / noise_sd**2
    found = np.linalg.solve(weighted @ features + np.diag(priors**-2), weighted @ values)
    return [float(each) for each in found]


def _receive(seen: Observation) -> float:
    """Receive time of a ready batch: where the loop waited for every one, the least of them hold hardly any waiting."""
    if seen.saw_ready:
        return float(seen.receive_s.mean())
    return float(np.minimum(seen.receive_s, np.quantile(seen.receive_s, LEAST_WAITED)).mean())


def _wanting(seen: Observation, contention: Contention) -> float:
    """Workers that ran or wanted to run during a burst."""
    wall, cpu = float(seen.service_s.mean()), float(seen.cpu_s.mean())
    if not seen.num_workers or wall <= 0:
        return float(seen.num_workers > 0)
    share = np.clip((wall - contention.wait_s) / wall, min(cpu / wall, 1.0), 1.0)
    return max(seen.workers_at_work, 1.0) * float(share)


def _mean(serial: Sequence[Observation], stage: str, otherwise: float) -> float:
    return float(np.mean([getattr(o, stage).mean() for o in serial])) if serial else otherwise


def _pin_seconds(fitted: Sequence[Observation], observations: Sequence[Observation], receive_s: float) -> float:
    pinned = [o.pin_s for o in fitted if o.pin_memory and o.pin_s is not None]
    if pinned:
        return float(np.mean(pinned))
    # The pinning thread also does what the training loop otherwise does: it rebuilds the batch from shared memory. The copy
    # to the device stays with the loop.
    rebuilt_s = max(receive_s - max(o.copy_s for o in observations), 0.0)
    return rebuilt_s + max(o.batch_bytes for o in observations) / PIN_BYTES_PER_S


def _hand_over_s(fitted: Sequence[Observation], receive_s: float) -> float:
    """Seconds in which the loop takes a pinned batch over, its copy to the device included."""
    copy_s = min((o.copy_s for o in fitted if not o.pin_memory), default=0.0)
    unseen = receive_s - copy_s * (1.0 - PINNED_COPY_SHARE) if copy_s else math.inf
    return min((float(o.receive_s.mean()) for o in fitted if o.pin_memory), default=unseen)
