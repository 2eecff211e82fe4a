"""A dataset and a collate function that note when they ran, so that every batch carries its own history.

A batch leaves the worker as `(batch, fetch)`, where `fetch` is a plain tuple of numbers: it takes the same road as the
batch itself (queue, pinning thread), needs no shared memory and no private torch API. Without workers the same pair comes
straight from the main process.

    fetch_start  first sample asked for          fetch_end  last sample there          collate_end  batch whole
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.stage_watch import StageWatch
from autotune_loader.pipeline.trace_log import Fetch
from autotune_loader.values.trace import MAIN_PROCESS

SHORT_S, CPU_EVERY = 0.0005, 8
"""Of batches shorter than this, CPU seconds are read for every 8th only: the two readings take 0.3 us."""


class _Process:
    """What one process knows of the batch that it is making; one is made at a time, so one slot is enough.

    Kept in one place and looked up once per batch: with the records as plain tuples, tracing stays near a microsecond,
    which is what 1 % of a batch from memory leaves.
    """

    __slots__ = ("asked", "begun", "cpu_begun", "cpu_clock", "cpu_share", "skip", "watch", "worker")

    def __init__(self) -> None:
        self.begun: float | None = None
        """Wall seconds at the begin."""
        self.asked: int | None = None
        """Samples that the batch was asked for, where it was asked for as a whole."""
        self.cpu_begun = 0.0
        """CPU seconds at the begin, where they are read for this batch."""
        self.skip = 0
        """Short batches to come for which they are not: they take `cpu_share` of their wall seconds."""
        self.cpu_share = 1.0
        self.worker = MAIN_PROCESS
        self.watch: StageWatch | None = None
        # In the main process the training step's threads must not count; in a worker every thread works for the batch.
        self.cpu_clock: Callable[[], float] = time.thread_time

    def becomes(self, worker: int) -> None:
        """A new worker, which must not inherit what a fork copied."""
        self.begun, self.asked, self.skip = None, None, 0
        self.worker, self.cpu_clock = worker, time.process_time

    def cpu_s(self, wall_s: float) -> float:
        """CPU seconds of the batch that ends now."""
        if self.skip:
            self.skip -= 1
            return self.cpu_share * wall_s
        cpu_s = self.cpu_clock() - self.cpu_begun
        if wall_s < SHORT_S:
            self.skip, self.cpu_share = CPU_EVERY - 1, cpu_s / wall_s if wall_s > 0 else 1.0
        return cpu_s


_here = _Process()


def _begin() -> None:
    here = _here
    if not here.skip:
        here.cpu_begun = here.cpu_clock()
    here.begun = time.monotonic()


class TracedCollate:
    """The user's collate function, which also closes the batch's record."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self._collate_fn = collate_fn
        self._batched = batched

    def __call__(self, samples: Any) -> tuple[Any, Fetch]:
        fetch_end = time.monotonic()
        here = _here
        if here.begun is None:
            _begin()
        start, here.begun = here.begun or fetch_end, None
        count, here.asked = here.asked, None
        if count is None and self._batched:
            count = len(samples)
        batch = self._collate_fn(samples)
        end = time.monotonic()
        if count is None:
            count = samples_in(batch) or 1
        cpu_s = here.cpu_s(end - start)
        report = here.watch.batch(end, end - start, cpu_s, count) if here.watch is not None else None
        if report is None:
            return batch, (here.worker, start, fetch_end, end, cpu_s, count)
        return batch, (here.worker, start, fetch_end, end, cpu_s, count, report)

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
        _begin()
        _here.asked = len(index) if isinstance(index, (list, np.ndarray)) else None
        return object.__getattribute__(self, "_inner")[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        here = _here
        here.asked = len(indices)  # what comes back may be a whole batch, of any type
        if not here.skip:
            here.cpu_begun = here.cpu_clock()
        here.begun = time.monotonic()
        if self._fetch_many:
            return self._fetch_many(indices)
        inner = self._inner
        return [inner[index] for index in indices]

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_inner"))


class TracedIterable(Wrapped, IterableDataset[Any]):
    """An IterableDataset that notes when a batch was begun and starts over when it ends, so that a burst has no tail."""

    def __iter__(self) -> Iterator[Any]:
        while (yield from self._epoch(self._begun())):
            pass

    def _begun(self) -> Iterator[Any]:
        return iter(object.__getattribute__(self, "_inner"))

    def _epoch(self, samples: Iterator[Any]) -> Generator[Any, None, bool]:
        """The dataset's samples once; returns whether there was any."""
        here, delivered = _here, False
        while True:
            if here.begun is None:
                _begin()
            try:
                sample = next(samples)
            except StopIteration:
                break
            delivered = True
            yield sample
        here.begun = None
        return delivered


class TracedEpoch(TracedIterable):
    """An IterableDataset that notes when a batch was begun and ends where it ends, as in training."""

    def __iter__(self) -> Iterator[Any]:
        return self._epoch(self._begun())  # begun at once, as without tracing: it may draw random numbers


class EndlessBatches:
    """A sampler, or batch sampler, that goes round again when its epoch ends: bursts measure the middle of training."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[Any]:
        delivered = True
        while delivered:
            delivered = False
            for item in self._inner:
                delivered = True
                yield item


def forget_open_batch() -> None:
    """Drop the record of a batch that was begun and never finished (a burst that failed in the main process)."""
    _here.begun, _here.asked, _here.skip = None, None, 0


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
        watches: whether what the worker is at is watched from then on.
    """

    def __init__(self, inner: Callable[[int], None] | None, watches: bool = False) -> None:
        self._inner = inner
        self._watches = watches

    def __call__(self, worker: int) -> None:
        _here.becomes(worker)
        _give_own_dataset()
        if self._inner is not None:
            self._inner(worker)
        _here.watch = StageWatch.begin() if self._watches else None

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._watches)),)
