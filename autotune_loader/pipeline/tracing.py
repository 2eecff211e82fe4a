"""A dataset and a collate function that note when they ran and what raised, so that every batch carries its own history.

A batch leaves the worker as `Handed`, with what was noted as a plain tuple: it takes the same road as the batch itself
(queue, pinning thread). Without workers the main process makes the same.

    fetch_start  first sample asked for          fetch_end  last sample there          collate_end  batch whole
    pin_start    the thread has the batch        pin_end    the batch is pinned
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.build import build_loader
from autotune_loader.pipeline.by_value import ByValue
from autotune_loader.pipeline.reading import Reading, seed_everything
from autotune_loader.pipeline.stage_clock import StageClock
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import MAIN_PROCESS, LoaderConfig
from autotune_loader.values.trace import StageSamples

Fetch = tuple[int, float, float, float, float, int, StageSamples | None]
"""worker, fetch_start, fetch_end, collate_end, cpu_s, samples; and now and then what clocks in the worker have seen"""


class Stamp:
    """Notes when torch pins what a batch holds: it calls this method of any object."""

    at: float | None = None

    def pin_memory(self) -> Stamp:
        self.at = time.monotonic()
        return self


class Handed(NamedTuple):
    """A batch on its way to the loop, between two stamps: torch pins the items of a tuple in their order."""

    before: Stamp
    batch: Any
    behind: Stamp
    fetch: Fetch

    @property
    def pinned(self) -> tuple[float | None, float | None]:
        """When the pinning thread had the batch, and had pinned it; None where there is none."""
        return (None, None) if self.fetch[0] == MAIN_PROCESS else (self.before.at, self.behind.at)


RAISED = (Exception, SystemExit)
"""What a sample may raise."""
OnError = Callable[[BaseException, str, Sequence[Any]], Any]
"""Is given what raised, the name of the samples, and their keys if any; what it returns takes the place of the batch."""
MOST_NAMED = 4
"""Samples of a batch that raises as a whole."""


@dataclass(slots=True)
class _Record:
    """What this process knows of the batch that it is making."""

    worker: int = MAIN_PROCESS
    clock: StageClock | None = None
    cpu_clock: Callable[[], float] = time.thread_time
    """In the main process the training step's threads must not count; in a worker every thread works for the batch."""
    begun: float | None = None
    """Wall seconds at the begin; None between two batches."""
    cpu_begun: float = 0.0
    asked: int | None = None
    """Samples that the batch was asked for, where it was asked for as a whole."""
    keys: Sequence[Any] = ()
    """Of its samples, where they have any."""
    in_place: Any = None
    """What takes the place of a batch whose samples raised."""

    def begin(self, keys: Sequence[Any] = (), asked: int | None = None) -> None:
        if self.begun is not None:  # of a stream, and of what torch wraps, one sample after the other is asked for
            return
        self.asked, self.keys, self.in_place = asked, keys, None
        if self.clock is not None:
            self.clock.fetch()
        self.cpu_begun = self.cpu_clock()
        self.begun = time.monotonic()


_here = _Record()


def _reraise(error: BaseException, _name: str, _keys: Sequence[Any]) -> Any:
    raise error


class TracedCollate(ByValue):
    """The user's collate function, which also closes the batch's record."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool, on_error: OnError) -> None:
        self._collate_fn, self._batched, self._on_error = collate_fn, batched, on_error

    def __call__(self, samples: Any) -> Handed:
        here = _here
        here.begin()
        fetch_end, clock = time.monotonic(), here.clock
        start, here.begun = here.begun or fetch_end, None
        if clock is not None:
            clock.collate(self._collate_fn)
        count = here.asked if here.asked is not None or not self._batched else len(samples)
        batch = here.in_place
        if batch is None:
            try:
                batch = self._collate_fn(samples)
            except RAISED as error:
                batch = self._on_error(error, _name_of(here.keys, "collate_fn of ") or "collate_fn", here.keys)
        end, cpu_s = time.monotonic(), here.cpu_clock() - here.cpu_begun
        if count is None:
            count = samples_in(batch) or 1
        report = None if clock is None else clock.batch(cpu_s, count)
        return Handed(Stamp(), batch, Stamp(), (here.worker, start, fetch_end, end, cpu_s, count, report))


class _Wrapped(ByValue):
    """A dataset that says it is of the user's class: torch shards and shuffles its own DataPipes."""

    def __init__(self, dataset: Any, on_error: OnError) -> None:
        self._inner, self._on_error = dataset, on_error

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        inner_class: type = self._inner.__class__
        return inner_class


class TracedDataset(_Wrapped):
    """A map-style dataset that notes when a batch was begun, and which sample raises.

    Torch calls `__getitems__` for a whole batch, and the loop in it is torch's own: tracing costs two clock readings per batch.
    """

    def __getitem__(self, key: Any) -> Any:
        _here.begin([key], len(key) if isinstance(key, (list, np.ndarray)) else None)
        try:
            return self._inner[key]
        except RAISED as error:
            _here.in_place = self._on_error(error, _name_of([key]), [key])

    def __getitems__(self, keys: list[Any]) -> Any:
        _here.begin(keys, len(keys))  # what comes back may be a whole batch, of any type
        inner, fetch_many, key = self._inner, getattr(self._inner, "__getitems__", None), None
        try:
            return fetch_many(keys) if fetch_many else [inner[key := each] for each in keys]
        except RAISED as error:
            raising = keys if fetch_many else [key]
            _here.in_place = self._on_error(error, _name_of(raising), raising)


class EndlessIterable(_Wrapped, IterableDataset[Any]):
    """An IterableDataset that notes when a batch was begun, and starts over when it ends, so that a burst has no tail."""

    def __iter__(self) -> Iterator[Any]:
        return self._noted(iter(self._inner))  # begun at once, as without tracing: it may draw random numbers

    def _noted(self, samples: Iterator[Any]) -> Iterator[Any]:
        here, delivered = _here, 0
        while True:
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
    _here.begun = None


class TracedWorkerInit(ByValue):
    """Runs in each new worker, the user's own function in it: a forked worker must not inherit an open record."""

    def __init__(self, inner: Callable[[int], None] | None, stages: bool = False) -> None:
        self._inner, self._stages = inner, stages

    def __call__(self, worker: int) -> None:
        forget_open_batch()
        _here.worker, _here.cpu_clock, _here.clock = worker, time.process_time, None
        info: Any = get_worker_info()
        dataset = getattr(info.dataset, "_inner", info.dataset)
        # Nothing stands between the user's function and the user's dataset; `info` refuses to be changed.
        object.__setattr__(info, "dataset", dataset)
        if self._inner is not None:
            self._inner(worker)
        if self._stages:
            _here.clock = StageClock(dataset)


def make_traced_loader(
    data: DataSide, config: LoaderConfig, reading: Reading, *, stages: bool = False, on_error: OnError = _reraise
) -> DataLoader[Any]:
    """A DataLoader of the user's parts that never ends and whose batches carry their history.

    With `stages`, workers are watched for where the time of a sample goes.
    """
    seed = reading.begin(data.dataset)
    seed_everything(seed)
    batched, size = data.is_batched, config.batch_size or data.batch_size
    parts: dict[str, Any] = {
        "collate_fn": TracedCollate(data.collate, batched, on_error),
        "worker_init_fn": TracedWorkerInit(data.worker_init_fn, stages),
        # Torch draws a seed for the workers with it, on the default device.
        "generator": data.generator or torch.Generator(torch.get_default_device()).manual_seed(seed),
    }
    if data.multiprocessing_context is not None:
        parts["multiprocessing_context"] = data.multiprocessing_context
    if data.is_iterable:
        dataset: Any = EndlessIterable(data.dataset, on_error)
        parts |= {"batch_size": size, "drop_last": data.drop_last}
    else:
        dataset, order = TracedDataset(data.dataset, on_error), reading.batches(size)
        parts |= {"batch_sampler": order} if batched else {"sampler": order, "batch_size": None}
    loader: DataLoader[Any] = build_loader(dataset, config, **parts)
    return loader
