"""The life of n batches through a DataLoader, for many configurations at once: exact given the times of every stage.

Written from `_MultiProcessingDataLoaderIter` (torch 2.13): `workers * prefetch` indices are handed out at the start,
and each delivery hands out one more; index i goes to worker `i % workers`. With the sampled times S (service), u
(receive) and g (step):

    C_i = max(P_{i - W pf}, C_{i - W}) + S_i        the worker is free and an index was handed out
    P_i = max(C_i, D_{i-1}) + u_i                   the training loop takes it over
    D_i = P_i + g_i                                 step done

Time 0 is when the workers can begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FILL_ROUNDS = 3
"""Rounds of `workers` batches before a steady window opens: by then the pipeline has left its synchronous start."""


def simulate(
    service_s: ArrayLike,
    receive_s: ArrayLike,
    step_s: ArrayLike,
    *,
    workers: ArrayLike,
    prefetch: ArrayLike,
) -> Floats:
    """When each step was done, in seconds from the moment the workers could begin, shape (batches, columns).

    Args:
        service_s: fetch and collate, shape (batches, columns).
        receive_s: in which the training loop takes a ready batch over; broadcast to that shape, as is the next.
        step_s: of the training step.
        workers: worker processes per column; 0 fetches in the training loop.
        prefetch: batches handed out ahead per worker, at least 1; ignored without workers.
    """
    service = np.asarray(service_s, dtype=np.float64)
    batches, columns = service.shape
    receive, step = (np.broadcast_to(np.asarray(each, dtype=np.float64), service.shape) for each in (receive_s, step_s))
    workers, prefetch = (np.broadcast_to(np.asarray(each, dtype=np.int64), (columns,)) for each in (workers, prefetch))
    serial = workers == 0
    lag = np.where(serial, 1, workers * prefetch)
    pad = int(lag.max(initial=1))
    fetched, delivered, done = (np.zeros((pad + batches, columns)) for _ in range(3))
    # Flat positions of each column's look-back in row 0; one row further is `columns` further on.
    here = np.arange(columns)
    handed_out, own_last = ((pad - back) * columns + here for back in (lag, np.maximum(workers, 1)))
    flat_fetched, flat_delivered, alone = fetched.ravel(), delivered.ravel(), bool(serial.any())
    for i in range(batches):
        row, offset = pad + i, i * columns
        ready = fetched[row]
        ordered = flat_delivered.take(handed_out + offset)
        if alone:  # without workers the loop itself fetches, once it has done the step before
            ordered = np.where(serial, done[row - 1], ordered)
        np.maximum(ordered, flat_fetched.take(own_last + offset), out=ready)
        ready += service[i]
        np.add(np.maximum(ready, done[row - 1]), receive[i], out=delivered[row])
        np.add(delivered[row], step[i], out=done[row])
    return done[pad:]


def batches_needed(workers: ArrayLike, batches: int) -> int:
    """Batches to simulate so that every column's steady window of `batches` is inside."""
    return int(_steady_window(workers, batches)[1].max()) + 1


def steady_rate(done: Floats, workers: ArrayLike, batches: int) -> Floats:
    """Batches per second once the pipeline is full, one value per column of `simulate`'s result.

    Both ends are averaged over some rounds, so that it matters little which batch is the first and which the last.
    """
    columns = np.arange(done.shape[1])
    first, last, per_round = (np.broadcast_to(each, columns.shape) for each in _steady_window(workers, batches))
    total = np.concatenate([np.zeros((1, len(columns))), np.cumsum(done, axis=0)])
    wave = np.maximum((last - first) // per_round // 8, 1) * per_round
    begun = (total[first + 1 + wave, columns] - total[first + 1, columns]) / wave
    ended = (total[last + 1, columns] - total[last + 1 - wave, columns]) / wave
    rate: Floats = (last - first - wave) / np.maximum(ended - begun, 1e-12)
    return rate


def _steady_window(workers: ArrayLike, batches: int) -> tuple[Ints, Ints, Ints]:
    """First and last batch of the window, as indices of `simulate`'s result, and batches in a round.

    It lies after the fill, and its whole rounds make the rate exact where workers deliver in waves.
    """
    per_round = np.maximum(np.asarray(workers, dtype=np.int64), 1)
    first = FILL_ROUNDS * per_round - 1
    return first, first + np.maximum(-(-batches // per_round), 3) * per_round, per_round


def quantile_order(pool: Floats, batches: int, rng: np.random.Generator) -> Floats:
    """The pool's quantiles, shuffled: its mean and its tail are in every run of so many batches."""
    values = np.quantile(pool, (np.arange(batches) + 0.5) / batches)
    order: Floats = rng.permutation(values * (pool.mean() / max(values.mean(), 1e-12)))
    return order


def relative(samples: Any) -> Floats:
    """The samples as multiples of their mean."""
    values = np.asarray(samples, dtype=np.float64)
    mean = values.mean()
    return values / mean if mean > 0 else np.ones_like(values)
