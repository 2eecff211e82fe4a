"""A dataset and a collate function that note when they ran and what raised, so that every batch carries its own history.

A batch leaves the worker as `(batch, fetch)`, where `fetch` is a plain tuple: it takes the same road as the batch itself
(queue, pinning thread), needs no shared memory and no private torch API. Without workers the main process makes the same pair.

    fetch_start  first sample asked for          fetch_end  last sample there          collate_end  batch whole
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.stage_clock import StageClock
from autotune_loader.values import MAIN_PROCESS, StageSamples

Fetch = tuple[int, float, float, float, float, int, StageSamples | None]
"""worker, fetch_start, fetch_end, collate_end, cpu_s, samples; and now and then what clocks in the worker have seen"""
RAISED = (Exception, SystemExit)
"""What a sample may raise."""
OnError = Callable[[BaseException, str, Sequence[Any]], Any]
"""Is given what raised, the name of the samples that raised it, and their keys where they have any. What it returns takes the
place of the batch, unless it raises."""
MOST_NAMED = 4
"""Samples of a batch that raises as a whole."""


class _Thread(threading.local):
    """What one thread knows of the batch that it is making."""

    def __init__(self) -> None:
        self.begun: float | None = None
        """Wall seconds at the begin."""
        self.asked: int | None = None
        """Samples that the batch was asked for, where it was asked for as a whole."""
        self.keys: Sequence[Any] = ()
        """Of its samples, where they have any."""
        self.in_place: Any = None
        """What takes the place of a batch whose samples raised."""
        self.cpu_begun = 0.0
        """CPU seconds at the begin."""
        self.worker = MAIN_PROCESS
        self.clock: StageClock | None = None
        # In the main process the training step's threads must not count; in a worker every thread works for the batch.
        self.cpu_clock: Callable[[], float] = time.thread_time

    def begin(self, keys: Sequence[Any] = (), asked: int | None = None) -> None:
        self.asked, self.keys, self.in_place = asked, keys, None
        if self.clock is not None:
            self.clock.fetch()
        self.cpu_begun = self.cpu_clock()
        self.begun = time.monotonic()


_here = _Thread()


def reraise(error: BaseException, _name: str, _keys: Sequence[Any]) -> Any:
    """The `OnError` that leaves an exception as it is."""
    raise error


class TracedCollate:
    """The user's collate function, which also closes the batch's record."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool, on_error: OnError) -> None:
        self._collate_fn, self._batched, self._on_error = collate_fn, batched, on_error

    def __call__(self, samples: Any) -> tuple[Any, Fetch]:
        here = _here
        if here.begun is None:
            here.begin()
        fetch_end, clock, count = time.monotonic(), here.clock, here.asked
        start, here.begun = here.begun or fetch_end, None
        if clock is not None:
            clock.collate(self._collate_fn)
        if count is None and self._batched:
            count = len(samples)
        batch = here.in_place
        if batch is None:
            try:
                batch = self._collate_fn(samples)
            except RAISED as error:
                batch = self._on_error(error, _name_of(here.keys, "collate_fn of ") or "collate_fn", here.keys)
        end, cpu_s = time.monotonic(), here.cpu_clock() - here.cpu_begun
        if count is None:
            count = samples_in(batch) or 1
        report = None if clock is None else clock.batch(end - start, cpu_s, count)
        return batch, (here.worker, start, fetch_end, end, cpu_s, count, report)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn, self._batched, self._on_error)),)


class _Wrapped:
    """To everything but the fetch a traced dataset is the user's own.

    `worker_init_fn` reaches the dataset through `get_worker_info().dataset` and may read and set its attributes or check
    its class; all of that goes through to the user's object.
    """

    def __init__(self, dataset: Any, on_error: OnError) -> None:
        object.__setattr__(self, "_inner", dataset)
        object.__setattr__(self, "_on_error", on_error)
        # A failing look-up costs more than a clock reading, so it is not repeated for every batch.
        object.__setattr__(self, "_fetch_many", getattr(dataset, "__getitems__", None))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        inner_class: type = self._inner.__class__
        return inner_class

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._on_error)),)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


class TracedDataset(_Wrapped):
    """A map-style dataset that notes when a batch was begun, and which sample raises.

    `__getitems__` is always there: torch then fetches a whole batch in one call, and the loop below is the one that torch
    would have run itself, so the cost of tracing is two clock readings per batch.
    """

    def __getitem__(self, key: Any) -> Any:
        _here.begin([key], len(key) if isinstance(key, (list, np.ndarray)) else None)
        try:
            return self._inner[key]
        except RAISED as error:
            _here.in_place = self._on_error(error, _name_of([key]), [key])

    def __getitems__(self, keys: list[Any]) -> Any:
        _here.begin(keys, len(keys))  # what comes back may be a whole batch, of any type
        inner, fetch_many, key = self._inner, self._fetch_many, None
        try:
            return fetch_many(keys) if fetch_many else [inner[key := each] for each in keys]
        except RAISED as error:
            raising = keys if fetch_many else [key]
            _here.in_place = self._on_error(error, _name_of(raising), raising)

    def __len__(self) -> int:
        return len(self._inner)


class EndlessIterable(_Wrapped, IterableDataset[Any]):
    """An IterableDataset that notes when a batch was begun, and starts over when it ends, so that a burst has no tail."""

    def __iter__(self) -> Iterator[Any]:
        return self._noted(iter(self._inner))  # begun at once, as without tracing: it may draw random numbers

    def _noted(self, samples: Iterator[Any]) -> Iterator[Any]:
        here, delivered = _here, 0
        while True:
            if here.begun is None:
                here.begin()
            try:
                sample = next(samples)
            except StopIteration:
                here.begun = None
                if not delivered:
                    return
                samples, delivered = iter(self._inner), 0
                continue
            except RAISED as error:
                name = f"the sample after {delivered:,} of a process's stream"
                here.in_place = sample = self._on_error(error, name, ())
                samples = itertools.repeat(sample)  # to the end of the batch
            delivered += 1
            yield sample


def _name_of(keys: Sequence[Any], what: str = "") -> str:
    """Samples as an error names them, by their keys: a number is one, whatever library made it."""
    names = [repr(key.item() if getattr(key, "ndim", None) == 0 else key) for key in keys[:MOST_NAMED]]
    if len(keys) == 1 and not what:
        return f"sample {names[0]}"
    return f"{what}the batch of samples {', '.join(names)}{', ...' * (len(keys) > MOST_NAMED)}" if names else ""


def forget_open_batch() -> None:
    """Drop the record of a batch that was begun and never finished (a burst that failed in the main process)."""
    _here.begun = _here.asked = _here.in_place = None
    _here.keys = ()


class TracedWorkerInit:
    """Runs in each new worker before the user's own worker_init_fn: a forked worker must not inherit an open record.

    Args:
        inner: the user's.
        stages: whether it is clocked from then on what the worker is at.
    """

    def __init__(self, inner: Callable[[int], None] | None, stages: bool = False) -> None:
        self._inner, self._stages = inner, stages

    def __call__(self, worker: int) -> None:
        forget_open_batch()
        _here.worker, _here.cpu_clock, _here.clock = worker, time.process_time, None
        info = get_worker_info()
        assert info is not None
        dataset = object.__getattribute__(info.dataset, "_inner")
        # No attribute of a wrapper stands before one of the user's; `info` refuses to be changed.
        object.__setattr__(info, "dataset", dataset)
        if self._inner is not None:
            self._inner(worker)
        if self._stages:
            _here.clock = StageClock(dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._stages)),)
