"""A dataset and a collate function that note when they ran, so that every batch carries its own history.

A batch leaves the worker as `(batch, fetch)`, where `fetch` is a plain tuple of numbers: it takes the same road as the
batch itself (queue, pinning thread), needs no shared memory and no private torch API. Without workers the same pair comes
straight from the main process.

    fetch_start  first sample asked for          fetch_end  last sample there          collate_end  batch whole
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.stage_clock import StageClock
from autotune_loader.values.stages import StageSamples
from autotune_loader.values.trace import MAIN_PROCESS

Fetch = tuple[int, float, float, float, float, int] | tuple[int, float, float, float, float, int, StageSamples]
"""worker, fetch_start, fetch_end, collate_end, cpu_s, samples; and now and then what clocks in the worker have seen"""
REPORTED: Final = 7
"""Figures of a fetch that carries what clocks have seen, as its last one."""


class _Thread(threading.local):
    """What one thread knows of the batch that it is making."""

    def __init__(self) -> None:
        self.begun: float | None = None
        """Wall seconds at the begin."""
        self.asked: int | None = None
        """Samples that the batch was asked for, where it was asked for as a whole."""
        self.cpu_begun = 0.0
        """CPU seconds at the begin."""
        self.worker = MAIN_PROCESS
        self.clock: StageClock | None = None
        # In the main process the training step's threads must not count; in a worker every thread works for the batch.
        self.cpu_clock: Callable[[], float] = time.thread_time


_here = _Thread()


def _begin(asked: int | None = None) -> None:
    here = _here
    here.asked = asked
    if here.clock is not None:
        here.clock.fetch()
    here.cpu_begun = here.cpu_clock()
    here.begun = time.monotonic()


class TracedCollate:
    """The user's collate function, which also closes the batch's record."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self._collate_fn = collate_fn
        self._batched = batched

    def __call__(self, samples: Any) -> tuple[Any, Fetch]:
        here = _here
        if here.begun is None:
            _begin()
        fetch_end, clock, count = time.monotonic(), here.clock, here.asked
        start, here.begun = here.begun or fetch_end, None
        if clock is not None:
            clock.collate(self._collate_fn)
        if count is None and self._batched:
            count = len(samples)
        batch = self._collate_fn(samples)
        end, cpu_s = time.monotonic(), here.cpu_clock() - here.cpu_begun
        if count is None:
            count = samples_in(batch) or 1
        report = None if clock is None else clock.batch(end - start, cpu_s, count)
        fetch: Fetch = (here.worker, start, fetch_end, end, cpu_s, count)
        return batch, fetch if report is None else (*fetch[:6], report)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn, self._batched)),)


class Wrapped:
    """What all kinds of wrapped datasets share: to everything but the fetch they are the user's own dataset.

    `worker_init_fn` reaches the dataset through `get_worker_info().dataset` and may read and set its attributes or check
    its class; all of that goes through to the user's object.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_inner", dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        inner_class: type = object.__getattribute__(self, "_inner").__class__  # that of the innermost
        return inner_class

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_inner"), name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), object.__getattribute__(self, "_inner"))),)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


class TracedDataset(Wrapped):
    """A map-style dataset that notes when a batch was begun.

    `__getitems__` is always there: torch then fetches a whole batch in one call, and the loop below is the one that torch
    would have run itself, so the cost of tracing is two clock readings per batch.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        # A failing look-up costs more than a clock reading, so it is not repeated for every batch.
        object.__setattr__(self, "_fetch_many", getattr(dataset, "__getitems__", None))

    def __getitem__(self, index: Any) -> Any:
        _begin(len(index) if isinstance(index, (list, np.ndarray)) else None)
        return object.__getattribute__(self, "_inner")[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        _begin(len(indices))  # what comes back may be a whole batch, of any type
        if self._fetch_many:
            return self._fetch_many(indices)
        inner = self._inner
        return [inner[index] for index in indices]

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_inner"))


class EndlessIterable(Wrapped, IterableDataset[Any]):
    """An IterableDataset that notes when a batch was begun, and starts over when it ends, so that a burst has no tail."""

    def __iter__(self) -> Iterator[Any]:
        inner = object.__getattribute__(self, "_inner")
        return self._noted(inner, iter(inner))  # begun at once, as without tracing: it may draw random numbers

    def _noted(self, inner: Any, samples: Iterator[Any]) -> Iterator[Any]:
        here, delivered = _here, False
        while True:
            if here.begun is None:
                _begin()
            try:
                sample = next(samples)
            except StopIteration:
                here.begun = None
                if not delivered:
                    return
                samples, delivered = iter(inner), False
            else:
                delivered = True
                yield sample


def forget_open_batch() -> None:
    """Drop the record of a batch that was begun and never finished (a burst that failed in the main process)."""
    _here.begun = _here.asked = None


def _give_own_dataset() -> None:
    """Let `get_worker_info().dataset` be the user's own: no attribute of a wrapper stands before one of the same name."""
    info = get_worker_info()
    while info is not None and issubclass(type(info.dataset), Wrapped):
        # It refuses to be changed.
        object.__setattr__(info, "dataset", object.__getattribute__(info.dataset, "_inner"))


class TracedWorkerInit:
    """Runs in each new worker before the user's own worker_init_fn: a forked worker must not inherit an open record.

    Args:
        inner: the user's.
        stages: whether it is clocked from then on what the worker is at.
    """

    def __init__(self, inner: Callable[[int], None] | None, stages: bool = False) -> None:
        self._inner = inner
        self._stages = stages

    def __call__(self, worker: int) -> None:
        forget_open_batch()
        _here.worker, _here.cpu_clock, _here.clock = worker, time.process_time, None
        _give_own_dataset()
        if self._inner is not None:
            self._inner(worker)
        info = get_worker_info()
        if self._stages and info is not None:
            _here.clock = StageClock(info.dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._stages)),)
