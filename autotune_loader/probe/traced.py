"""A dataset and a collate function that note when they ran, so that every batch carries its own history.

A batch leaves the worker as `(batch, fetch)`, where `fetch` is a plain tuple of numbers: it takes the same road as the
batch itself (queue, pinning thread), needs no shared memory and no private torch API. Without workers the same pair comes
straight from the main process.

    fetch_start  first sample asked for          fetch_end  last sample there          collate_end  batch whole
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from autotune_loader.trial import MAIN_PROCESS

Fetch = tuple[int, float, float, float, float, int]
"""worker, fetch_start, fetch_end, collate_end, cpu_s, samples"""

# When the batch that is being made in this process was begun: (wall seconds, CPU seconds). One batch at a time is made in
# a process, so one slot is enough.
_begun: list[tuple[float, float]] = []


def _begin() -> None:
    if not _begun:
        _begun.append((time.monotonic(), _cpu_s()))


def _cpu_s() -> float:
    # In a worker every thread works for the batch; in the main process the training step's threads must not count.
    return time.process_time() if get_worker_info() is not None else time.thread_time()


class TracedCollate:
    """The user's collate function, which also closes the batch's record."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self._collate_fn = collate_fn
        self._batched = batched

    def __call__(self, samples: Any) -> tuple[Any, Fetch]:
        fetch_end = time.monotonic()
        start, cpu_start = _begun.pop() if _begun else (fetch_end, _cpu_s())
        count = len(samples) if self._batched else 1
        batch = self._collate_fn(samples)
        info = get_worker_info()
        worker = info.id if info is not None else MAIN_PROCESS
        return batch, (worker, start, fetch_end, time.monotonic(), _cpu_s() - cpu_start, count)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loads, (_dumps((type(self), self._collate_fn, self._batched)),)


class _Traced:
    """What both kinds of traced dataset share: to everything but the fetch they are the user's own dataset.

    `worker_init_fn` reaches the dataset through `get_worker_info().dataset` and may read and set its attributes or check
    its class; all of that goes through to the user's object.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_inner", dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "_inner"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_inner"), name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loads, (_dumps((type(self), object.__getattribute__(self, "_inner"))),)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


class TracedDataset(_Traced):
    """A map-style dataset that notes when a batch was begun.

    `__getitems__` is always there: torch then fetches a whole batch in one call, and the loop below is the one that torch
    would have run itself, so the cost of tracing is two clock readings per batch.
    """

    def __getitem__(self, index: Any) -> Any:
        _begin()
        return object.__getattribute__(self, "_inner")[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        _begin()
        inner = object.__getattribute__(self, "_inner")
        if getattr(inner, "__getitems__", None):
            samples: list[Any] = inner.__getitems__(indices)
            return samples
        return [inner[index] for index in indices]

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_inner"))


class TracedIterable(_Traced, IterableDataset[Any]):
    """An IterableDataset that notes when a batch was begun and starts over when it ends, so that a burst has no tail."""

    def __iter__(self) -> Iterator[Any]:
        inner = object.__getattribute__(self, "_inner")
        delivered = True
        while delivered:
            delivered = False
            samples = iter(inner)
            while True:
                _begin()
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                delivered = True
                yield sample
        _begun.clear()


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
    _begun.clear()


class TracedWorkerInit:
    """Runs in each new worker before the user's own worker_init_fn: a forked worker must not inherit an open record."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        forget_open_batch()
        if self._inner is not None:
            self._inner(worker)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loads, (_dumps((type(self), self._inner)),)


def _dumps(parts: tuple[Any, ...]) -> bytes:
    # A spawned worker unpickles with plain pickle and has another __main__; cloudpickle carries such classes by value.
    import cloudpickle

    data: bytes = cloudpickle.dumps(parts)
    return data


def _loads(data: bytes) -> Any:
    import pickle

    made_by, *arguments = pickle.loads(data)
    return made_by(*arguments)
