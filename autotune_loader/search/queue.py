"""The life of n batches through a DataLoader, for many configurations at once: exact given the times of every stage.

Written from `_MultiProcessingDataLoaderIter` (torch 2.13): `workers * prefetch` indices are handed out at the start,
and each delivery hands out one more; index i goes to worker `i % workers`. With the sampled times S (service), t
(pinning, 0 without a thread that pins), u (receive) and g (step):

    C_i = max(P_{i - W pf}, C_{i - W}) + S_i        the worker is free and an index was handed out
    T_i = max(C_i, T_{i-1}) + t                     the pinning thread is free
    P_i = max(T_i, D_{i-1}) + u_i                   the training loop takes it over
    D_i = P_i + g_i                                 step done

Time 0 is when the workers can begin.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FILL_ROUNDS = 3  # of `workers` batches before the steady window: by then the pipeline has left its synchronous start


def simulate(
    service_s: Floats, receive_s: Floats, step_s: Floats, *, workers: Ints, prefetch: Ints, pin_s: float = 0.0
) -> Floats:
    """When each step was done, in seconds from the moment the workers could begin, shape (batches, columns).

    `service_s` has that shape, `receive_s` and `step_s` are broadcast to it; workers, and prefetch of at least 1, are those of
    each column. Without workers the training loop fetches, and nothing is pinned by a thread.
    """
    batches, columns = service_s.shape
    receive, step = (np.broadcast_to(each, service_s.shape) for each in (receive_s, step_s))
    serial = workers == 0
    lag = np.where(serial, 1, workers * prefetch)
    pad = int(lag.max(initial=1))
    fetched, delivered, done = (np.zeros((pad + batches, columns)) for _ in range(3))
    # Flat positions of each column's look-back in row 0; one row further is `columns` further on.
    here = np.arange(columns)
    handed_out, own_last = ((pad - back) * columns + here for back in (lag, np.maximum(workers, 1)))
    flat_fetched, flat_delivered, has_serial = fetched.ravel(), delivered.ravel(), bool(serial.any())
    pinning, pinned = np.where(serial, 0.0, pin_s), np.zeros(columns)
    for i in range(batches):
        row, offset = pad + i, i * columns
        ready = fetched[row]
        ordered = flat_delivered.take(handed_out + offset)
        if has_serial:  # without workers the loop itself fetches, once it has done the step before
            ordered = np.where(serial, done[row - 1], ordered)
        np.maximum(ordered, flat_fetched.take(own_last + offset), out=ready)
        ready += service_s[i]
        if pin_s:
            pinned = np.maximum(ready, pinned) + pinning
        np.add(np.maximum(pinned if pin_s else ready, done[row - 1]), receive[i], out=delivered[row])
        np.add(delivered[row], step[i], out=done[row])
    return done[pad:]


def steady_window(workers: Ints, batches: int) -> tuple[Ints, Ints, Ints]:
    """First and last batch of a window of so many batches, as indices of `simulate`'s result, and batches in a round.

    It lies after the fill, and its whole rounds make the rate exact where workers deliver in waves.
    """
    per_round = np.maximum(workers, 1)
    first = FILL_ROUNDS * per_round - 1
    return first, first + np.maximum(-(-batches // per_round), 3) * per_round, per_round


def steady_rate(done: Floats, first: Ints, last: Ints, per_round: Ints) -> Floats:
    """Batches per second in a steady window, one value per column of `simulate`'s result.

    Both ends are averaged over some rounds, so that it matters little which batch is the first and which the last.
    """
    columns = np.arange(done.shape[1])
    total = np.concatenate([np.zeros((1, len(columns))), np.cumsum(done, axis=0)])
    wave = np.maximum((last - first) // per_round // 8, 1) * per_round
    begun = (total[first + 1 + wave, columns] - total[first + 1, columns]) / wave
    ended = (total[last + 1, columns] - total[last + 1 - wave, columns]) / wave
    rate: Floats = (last - first - wave) / np.maximum(ended - begun, 1e-12)
    return rate
