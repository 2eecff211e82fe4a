"""A whole epoch, batch by batch: how busy everything is changes from its first batch to its last.

    all workers fetch, nothing lies ready │ as in the midst of training │ the last batches: fewer and fewer workers fetch,
                                                                          and the step has the cores to itself

An epoch that workers fetch in two or three rounds is hardly ever in the midst of training. So the stage times of each batch
are those of the load beside it, found by turns: times, from these who worked beside whom, from that times again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune_loader.twin.calibration import Calibration
from autotune_loader.twin.queue import Floats, simulate_in_order
from autotune_loader.twin.stages import Columns, Load, Stages, at_columns

# Batches slow each other down: so often the loads follow from who is at work when, and the other way round.
TURNS = 4
# Begin and end among the moments of a batch.
FETCH, CONSUMPTION = (0, 1), (2, 3)


def epoch_ends(columns: Columns, settled: Load, service: Floats, step: Floats, calibration: Calibration) -> Floats:
    """Seconds from the moment the workers begin until the epoch's last step is done, per column.

    Args:
        columns: what is asked, all of it with workers and in order.
        settled: the load in the midst of training, which the first turn begins with.
        service: service times of the epoch's batches relative to their mean, shape (batches, columns).
        step: the same of the steps.
        calibration: what the bursts taught.
    """
    shape = service.shape
    every_batch = np.tile(np.arange(shape[1]), shape[0])
    batchwise = at_columns(columns, every_batch)
    fitted = calibration.contention.take(batchwise.draw)
    fetching = stepping = at_columns(settled, every_batch)
    ends = np.zeros(shape[1])
    for _ in range(TURNS):
        fetches, steps = (calibration.stages(batchwise, fitted, load) for load in (fetching, stepping))
        service_s, step_s = service * fetches.service_s.reshape(shape), step * steps.step_s.reshape(shape)
        receive_s = steps.receive_s.reshape(shape)
        fetched, done = simulate_in_order(
            service_s,
            receive_s,
            step_s,
            workers=columns.workers,
            prefetch=columns.prefetch,
            pin_s=fetches.pin_s.reshape(shape)[0],
            transit_s=fetches.transit_s.reshape(shape)[0],
            device_prefetch=columns.ahead,
        )
        ends = done[-1]
        beside_fetch, beside_step = _beside(fetched, service_s, done, receive_s + step_s)
        fetching = fetching.halfway(to=beside_fetch.load(fetches))
        stepping = stepping.halfway(to=beside_step.load(steps))
    return ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beside:
    """Means over the time that something took."""

    workers: Floats
    """Workers that fetched, each at least as long as it took itself."""
    consumer: Floats
    """Share in which the consumer worked."""

    def load(self, stages: Stages) -> Load:
        """The load that stage times follow from; `stages` as they were before."""
        workers = self.workers.ravel()
        return Load(
            at_work=workers,
            busy=np.maximum(workers, 1.0),
            wanting=workers * stages.cpu_share,
            consumer=self.consumer.ravel(),
        )


def _beside(fetched: Floats, service_s: Floats, done: Floats, consumer_s: Floats) -> tuple[_Beside, _Beside]:
    """Who worked while each batch was fetched, and while the consumer had it; all of shape (batches, columns)."""
    moments = np.stack([fetched - service_s, fetched, done - consumer_s, done])
    by_workers, by_consumer = _worked(moments, FETCH), _worked(moments, CONSUMPTION)

    def during(begin: int, end: int) -> _Beside:
        took_s = np.maximum(moments[end] - moments[begin], 1e-12)
        workers, consumer = ((worked[end] - worked[begin]) / took_s for worked in (by_workers, by_consumer))
        return _Beside(workers=workers, consumer=np.clip(consumer, 0.0, 1.0))

    return during(*FETCH), during(*CONSUMPTION)


def _worked(moments: Floats, span: tuple[int, int]) -> Floats:
    """Seconds that all who did such work had spent on it up to each moment, in the shape of `moments`.

    Args:
        moments: shape (kinds, batches, columns).
        span: the kinds with which such work begins and ends.
    """
    began, ended = span
    change = np.zeros_like(moments)
    change[began], change[ended] = 1.0, -1.0
    flat = moments.reshape(-1, moments.shape[2])
    order = flat.argsort(axis=0, kind="stable")
    at_work = np.take_along_axis(change.reshape(flat.shape), order, axis=0).cumsum(axis=0)[:-1]
    passed_s = np.diff(np.take_along_axis(flat, order, axis=0), axis=0)
    worked: Floats = np.zeros_like(flat)
    np.put_along_axis(worked, order[1:], (at_work * passed_s).cumsum(axis=0), axis=0)
    return worked.reshape(moments.shape)
