"""The life of n batches through a DataLoader, for many configurations at once: exact given the times of every stage.

Written from `_MultiProcessingDataLoaderIter` (torch 2.13): `workers * prefetch` indices are handed out at the start,
and each delivery hands out one more. In order, index i goes to worker `i % workers`; with `in_order=False` only the
worker that delivered has room, so the next index goes to it. With the sampled times S (service), t (transit), p (pin),
u (receive), g (step) and a device prefetch depth of d:

    C_i = max(P_{i - W pf}, C_{i - W}) + S_i        the worker is free and an index was handed out
    R_i = max(C_i + t, R_{i-1}) + p_i               it has travelled, and one thread pins all batches
    P_i = max(R_i, P_{i-1}, D_{i-1-d}) + u_i        the training loop has it
    D_i = max(P_i, D_{i-1}) + g_i                   step done

Time 0 is when the workers can begin; the caller adds start-up. `sequences` makes the batches of a simulated run from what
the bursts saw.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STEADY_BATCHES = 192
"""Batches in the window of a steady rate: a variation of 20 % leaves 1.4 %, and `Twin` averages several runs."""
MOST_STEADY_BATCHES = 960
"""The same for batches that differ much: which worker the slow ones fall to is luck that a longer run evens out."""
LIGHT_VARIATION = 0.4
"""Standard deviation over mean of service times up to which `STEADY_BATCHES` are enough."""
FILL_ROUNDS = 3
"""Rounds of `workers` batches before the window opens: by then the pipeline has left its synchronous start."""


class Times(NamedTuple):
    """What each stage takes, in seconds; all are broadcast to `service_s`."""

    service_s: ArrayLike
    """Fetch and collate, shape (batches, columns) or (batches,) for one column. Batch i is the i-th handed out."""
    receive_s: ArrayLike
    """In which the training loop takes a ready batch over."""
    step_s: ArrayLike
    pin_s: ArrayLike = 0.0
    """Of the pinning thread, per batch and column; ignored without workers."""
    transit_s: ArrayLike = 0.0
    """In which a whole batch travels while nobody works on it, per column; ignored without workers."""


def simulate(
    times: Times,
    *,
    workers: ArrayLike,
    prefetch: ArrayLike,
    device_prefetch: ArrayLike = 0,
    in_order: ArrayLike = True,
) -> Floats:
    """When each step was done, in seconds from the moment the workers could begin, shape (batches, columns).

    Args:
        times: of every stage.
        workers: worker processes per column; 0 fetches in the training loop.
        prefetch: batches handed out ahead per worker, at least 1; ignored without workers.
        device_prefetch: batches received ahead of the step, per column.
        in_order: whether batches are delivered in the order they were handed out, per column.
    """
    service = np.asarray(times.service_s, dtype=np.float64)
    service = service[:, None] if service.ndim == 1 else service
    shape = service.shape
    receive, step = (_column_shaped(values, shape) for values in (times.receive_s, times.step_s))
    columns: dict[str, Any] = {
        "workers": np.broadcast_to(np.asarray(workers, dtype=np.int64), shape[1:]),
        "prefetch": np.broadcast_to(np.asarray(prefetch, dtype=np.int64), shape[1:]),
        "pin_s": np.broadcast_to(np.asarray(times.pin_s, dtype=np.float64), shape[1:]),
        "transit_s": np.broadcast_to(np.asarray(times.transit_s, dtype=np.float64), shape[1:]),
        "device_prefetch": np.broadcast_to(np.asarray(device_prefetch, dtype=np.int64), shape[1:]),
    }
    serial = columns["workers"] == 0
    ordered = np.broadcast_to(np.asarray(in_order, dtype=bool), shape[1:]) & ~serial
    done = np.empty(shape)
    for chosen, run in ((serial, _serial), (ordered, _done_in_order), (~ordered & ~serial, _out_of_order)):
        if chosen.all():
            return run(service, receive, step, **columns)
        if chosen.any():
            picked = {name: values[chosen] for name, values in columns.items()}
            done[:, chosen] = run(service[:, chosen], receive[:, chosen], step[:, chosen], **picked)
    return done


def _column_shaped(values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1 and shape[1] == 1:
        array = array[:, None]
    return np.broadcast_to(array, shape)


def steady_batches(variation: float) -> int:
    """Batches that the window of a steady rate needs when service times vary by so much (standard deviation over mean)."""
    return min(MOST_STEADY_BATCHES, max(STEADY_BATCHES, round(STEADY_BATCHES * (variation / LIGHT_VARIATION) ** 2)))


def steady_window(workers: ArrayLike, batches: int = STEADY_BATCHES) -> tuple[Ints, Ints]:
    """First and last batch of the steady window, as indices of `simulate`'s result: whole rounds after the fill.

    A window of whole rounds makes the rate exact where workers deliver in waves.
    """
    per_round = np.maximum(np.asarray(workers, dtype=np.int64), 1)
    rounds = -(-batches // per_round)
    first = FILL_ROUNDS * per_round - 1
    return first, first + rounds * per_round


def batches_needed(workers: ArrayLike, batches: int = STEADY_BATCHES) -> int:
    """Batches to simulate so that every column's steady window is inside."""
    return int(steady_window(workers, batches)[1].max()) + 1


def steady_rate(done: Floats, workers: ArrayLike, batches: int = STEADY_BATCHES) -> Floats:
    """Batches per second once the pipeline is full, one value per column of `simulate`'s result."""
    columns = np.arange(done.shape[1])
    first, last = (np.broadcast_to(index, columns.shape) for index in steady_window(workers, batches))
    rate: Floats = (last - first) / (done[last, columns] - done[first, columns])
    return rate


def _serial(service: Floats, receive: Floats, step: Floats, **_: Any) -> Floats:
    return np.cumsum(service + receive + step, axis=0)


def _done_in_order(service: Floats, receive: Floats, step: Floats, **columns: Any) -> Floats:
    return simulate_in_order(service, receive, step, **columns)[1]


def burst_rate(done: Floats, workers: Ints, batches: Ints) -> Floats:
    """Batches per second that a burst shows: `batches` of them after each worker's first, both ends averaged over a round.

    Args:
        done: result of `simulate`, at least workers + batches + 1 long.
        workers: worker processes per column.
        batches: batches in the window per column, at least 2.
    """
    columns = np.arange(done.shape[1])
    total = np.concatenate([np.zeros((1, done.shape[1])), np.cumsum(done, axis=0)])
    wave = np.clip(workers, 1, batches // 2)
    first, last = workers, workers + batches
    begun = (total[first + wave, columns] - total[first, columns]) / wave
    ended = (total[last + 1, columns] - total[last + 1 - wave, columns]) / wave
    rate: Floats = (batches + 1 - wave) / (ended - begun)
    return rate


def simulate_in_order(
    service: Floats,
    receive: Floats,
    step: Floats,
    *,
    workers: Ints,
    prefetch: Ints,
    pin_s: Floats,
    transit_s: Floats,
    device_prefetch: Ints,
) -> tuple[Floats, Floats]:
    """When each batch was fetched and when its step was done, as `simulate` has it, of columns with workers and in order.

    Every argument has the shape that `simulate` broadcasts it to.
    """
    batches, columns = service.shape
    lag = workers * prefetch
    pad = int(max(lag.max(), device_prefetch.max() + 1))
    fetched, delivered, done = (np.zeros((pad + batches, columns)) for _ in range(3))
    # Flat positions of each column's look-back in row 0; one row further is `columns` further on.
    here = np.arange(columns)
    handed_out, own_last, step_before = ((pad - back) * columns + here for back in (lag, workers, device_prefetch + 1))
    flat_fetched, flat_delivered, flat_done = fetched.ravel(), delivered.ravel(), done.ravel()
    pins = bool(pin_s.any())
    travels = bool(transit_s.any())
    overlaps = bool(device_prefetch.any())
    pinned = np.zeros(columns)
    for i in range(batches):
        row, offset = pad + i, i * columns
        ready = fetched[row]
        np.maximum(flat_delivered.take(handed_out + offset), flat_fetched.take(own_last + offset), out=ready)
        ready += service[i]
        if travels:
            ready = ready + transit_s
        if pins:
            np.maximum(pinned, ready, out=pinned)
            pinned += pin_s
            ready = pinned
        if overlaps:
            free = np.maximum(delivered[row - 1], flat_done.take(step_before + offset))
            np.add(np.maximum(ready, free), receive[i], out=delivered[row])
            np.add(np.maximum(delivered[row], done[row - 1]), step[i], out=done[row])
        else:
            np.add(np.maximum(ready, done[row - 1]), receive[i], out=delivered[row])
            np.add(delivered[row], step[i], out=done[row])
    return fetched[pad:], done[pad:]


def _out_of_order(
    service: Floats,
    receive: Floats,
    step: Floats,
    *,
    workers: Ints,
    prefetch: Ints,
    pin_s: Floats,
    transit_s: Floats,
    device_prefetch: Ints,
) -> Floats:
    batches, columns = service.shape
    here = np.arange(columns)
    ready, sent = _first_hand_out(service, workers, prefetch)
    head = np.zeros((columns, int(workers.max())), dtype=np.int64)
    last = np.take_along_axis(ready, (prefetch - 1)[:, None, None], axis=2)[:, :, 0]
    next_ready = ready[:, :, 0].copy()
    pad = int(device_prefetch.max()) + 1
    done = np.zeros((pad + batches, columns))
    delivered, pinned = np.zeros(columns), np.zeros(columns)
    for i in range(batches):
        worker = next_ready.argmin(axis=1)
        pinned = np.maximum(pinned, next_ready[here, worker] + transit_s) + pin_s
        free = np.maximum(delivered, done[pad + i - 1 - device_prefetch, here])
        delivered = np.maximum(pinned, free) + receive[i]
        done[pad + i] = np.maximum(delivered, done[pad + i - 1]) + step[i]
        # Indices past the last batch are never delivered within the run: their times do not matter.
        fetch_s = service[np.minimum(sent + i, batches - 1), here]
        last[here, worker] = np.maximum(last[here, worker], delivered) + fetch_s
        slot = head[here, worker]
        ready[here, worker, slot] = last[here, worker]
        head[here, worker] = (slot + 1) % prefetch
        next_ready[here, worker] = ready[here, worker, head[here, worker]]
    return done[pad:]


def _first_hand_out(service: Floats, workers: Ints, prefetch: Ints) -> tuple[Floats, Ints]:
    """Completion times of the first hand-out, shape (columns, workers, prefetch), inf where there is none."""
    batches, columns = service.shape
    ready = np.full((columns, int(workers.max()), int(prefetch.max())), np.inf)
    for column in range(columns):
        count, depth = int(workers[column]), int(prefetch[column])
        # A run shorter than the first hand-out repeats its last time; those batches are not delivered.
        index = np.minimum(np.arange(count * depth), batches - 1).reshape(depth, count)
        ready[column, :count, :depth] = np.cumsum(service[index, column], axis=0).T
    return ready, workers * prefetch


def relative(samples: Floats) -> Floats:
    mean = samples.mean()
    return samples / mean if mean > 0 else np.ones_like(samples)


def sequences(pool: Floats, batches: int, rng: np.random.Generator) -> Floats:
    """One order of batches per draw: the pool's quantiles shuffled, so that its mean and tail are there in every run.

    The draws resample the pool; they share the best fit's orders, so that only what was resampled tells them apart.
    """
    quantiles = (np.arange(batches) + 0.5) / batches
    orders = [rng.permutation(batches) for _ in range(BEST)]
    sequences = np.empty((batches, BEST + DRAWS))
    for draw in range(BEST + DRAWS):
        seen = pool if draw < BEST else rng.choice(pool, size=len(pool))
        values = np.quantile(seen, quantiles)
        sequences[:, draw] = (values * (seen.mean() / max(values.mean(), 1e-12)))[orders[draw % BEST]]
    return sequences


BEST = 3
"""Runs of the best fit per configuration, each with the batches in another order; their mean is the prediction."""
DRAWS = 9
"""Runs with drawn parameters per configuration; their spread makes the interval."""
