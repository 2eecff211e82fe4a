"""From bursts to a `Calibration`: the contention model, and the nodes that bend it through every burst."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autotune_loader.twin.calibration import ALONE, BEST, DRAWS, MACHINE_SPEED_SD, Calibration, Nodes
from autotune_loader.twin.contention import BURST_SD, Contention, busy_beside, fit_contention
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.recursion import Floats
from autotune_loader.twin.smoothing import noise_sd, sampling_variance, smooth, smooth_by_kind
from autotune_loader.twin.stages import starved_threads, step_share

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
        service=Nodes.of(list(at_work), smooth(np.log(np.maximum(at_work, 1.0)), bends, noise**2 + sampling)),
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
    wanting = np.asarray(
        _busy(seen, contention) * (seen.num_workers > 0) * wanted_share(seen, float(contention.wait_s[0]))
    )
    return float(starved_threads(wanting, np.asarray(threads_of(seen.consumer_threads)), np.asarray(cores)))


def _step_bend(
    seen: Observation,
    threads_of: Callable[[int | None], float],
    step_base_s: Mapping[int | None, float],
    contention: Contention,
    cores: float,
    rng: np.random.Generator,
) -> Floats:
    wanting = np.asarray(
        _busy(seen, contention) * (seen.num_workers > 0) * wanted_share(seen, float(contention.wait_s[0]))
    )
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
