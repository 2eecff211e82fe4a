"""Which samples each burst of a run reads: such as no burst before it has read, as long as the dataset lasts.

What was read once lies in the page cache: a burst that reads it again measures memory, where training will measure the disk. So
all bursts of a run are one long reading of the dataset, and each takes up where the one before stopped:

    shuffled         one permutation, of a long epoch in stretches, each of samples from all over it
    in order         blocks of a few batches from all over the epoch in turn, so that an order by length harms no burst
    sampler of yours the same blocks, of what it gives in a tenth of a second; its own order where that keeps to one place of
                     the dataset after another, which may hold a shard in memory
    stream           begun anew by each burst, with another seed, and in another epoch where it has `set_epoch`

An epoch has no end: a reading that begins in its midst has read all of it when it is there again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from autotune_loader.pipeline.workload import DataSide

BLOCK_BATCHES = 4
"""Batches that follow each other as in training, so that reading ahead is seen: one burst reads several such blocks."""
SPREAD = 0.618
"""Steps of this part of an epoch visit it evenly, however many there are (the golden ratio)."""
STRETCH = 1 << 20
"""Samples that are shuffled at once: a dataset may say that it has more than memory holds the order of."""
MOST_SAMPLES = 1 << 31
"""No burst reads further, however long a dataset of crops says that it is: the product of two places fits in 64 bits."""
DRAWN_S, MOST_DRAWN_S = 0.1, 1.0
"""Seconds that a sampler may compute what will be read next, and seconds of the clock, of which a busy machine takes some."""
FAR_AWAY, LONG_AGO = 16, 4
"""Times the median distance of neighbours, in the dataset and in what a sampler gives, within which they are of one run."""
THIN, THINNEST = 0.05, 2
"""Runs meet where so few neighbours, of the median and at most, are on both sides: shards that follow each other have one."""
SHORTEST_RUN = 8
"""Samples: fewer come together by chance."""
FRESH_STARTS, NEXT_START = 64, 7
"""By its seed a reading begins in one of so many places of the epoch, and the one of the next seed so many further: a probe
that had to be started anew does not know what was read."""
SIDES_APART = 161
"""Between the seeds of the sides of a comparison, who may have files in common: they begin 0.61 of an epoch apart, however many
they are, and a stream in other epochs."""
STREAM = (
    "the dataset is a stream, which every trial restarts: if it always gives the same samples first, the disk was measured "
    "by the first trial only, and the others read from memory"
)


class Reading:
    """The order in which the bursts of one run read the samples; kept in the process that builds their loaders.

    A run with another seed begins at another place of the same epoch.
    """

    def __init__(self, data: DataSide, seed: int = 0) -> None:
        self._data, self._seed, self._burst_seed = data, seed, seed * 1000
        self._has_own_order = data.is_iterable or data.has_own_order or not data.samples_per_epoch()
        self._samples = min(data.samples_per_epoch() or 0, MOST_SAMPLES)
        self._block = BLOCK_BATCHES * (data.batch_size or 1)
        self._part = seed * NEXT_START % FRESH_STARTS / FRESH_STARTS
        self._origin = self._at = int(self._part * (self._samples // self._block)) * self._block
        self._pass = 0
        self._own: dict[int | None, Iterator[Any]] = {}
        """What the user's sampler gives, by samples of a batch."""
        self._runs, self._size = dict[int | None, int](), data.batch_size
        """Batches of a run of the sampler, by samples of a batch; and these in the latest burst."""

    @property
    def note(self) -> str | None:
        """What the user should know, where bursts cannot be kept from reading the same samples."""
        is_told_epoch = callable(getattr(self._data.dataset, "set_epoch", None))
        return STREAM if self._data.is_iterable and not is_told_epoch else None

    @property
    def run(self) -> int:
        """Batches that the sampler has taken, in the latest burst, from one place before it went on to another; 0 for no such.

        Where a dataset holds one shard in memory, these come with one load of it.
        """
        return self._runs.get(self._size, 0)

    def begin(self, dataset: Any) -> int:
        """Another burst begins, on this dataset; returns its seed, for all that is random but the order."""
        self._burst_seed += 1
        set_epoch = getattr(dataset, "set_epoch", None)
        if self._data.is_iterable and callable(set_epoch):
            set_epoch(sum(divmod(self._burst_seed, 1000)))
        return self._burst_seed

    @property
    def place(self) -> Any:
        """Where the next burst goes on, for a reading of the same data in another process."""
        return self._burst_seed, self._origin, self._pass, self._at

    def go_on(self, place: Any) -> None:
        """Take up where a reading in another process has stopped, or where every reading with this seed begins.

        A sampler of the user's goes on by itself here.
        """
        if isinstance(place, int):
            place = Reading(self._data, place).place
        self._burst_seed, self._origin, self._pass, self._at = place

    def batches(self, size: int | None = None) -> Iterator[Any]:
        """Batches of indices without end, or single indices for no size; none where an epoch has none."""
        if not self._has_own_order:
            each = self._planned(size or 1)
            return each if size is not None else (indices[0] for indices in each)
        self._size = size
        return self._own.setdefault(size, self._of_sampler(size))

    def _planned(self, size: int) -> Iterator[list[int]]:
        end = self._samples - (self._samples % size if self._data.drop_last else 0)
        while end:
            first = -(-self._at // size) * size  # where a batch of training begins
            if self._data.is_shuffled and first // STRETCH != (min(first + size, end) - 1) // STRETCH:
                first += size
            if first >= end:
                first, self._pass = 0, self._pass + 1
            self._at = min(first + size, end)
            if self._data.is_shuffled:
                stretch, begin = divmod(first, STRETCH)
                epoch = self._pass - (first < self._origin)
                yield _shuffled(self._samples, epoch, stretch)[begin : begin + self._at - first].tolist()
            else:
                yield _spread(np.arange(first, self._at), self._samples, self._block).tolist()

    def _of_sampler(self, size: int | None) -> Iterator[Any]:
        """What the user's own sampler gives, epoch after epoch."""
        data = self._data
        batches: Iterable[Any] = data.batch_sampler if data.batch_sampler is not None else data.sampler
        if size is not None and data.batch_sampler is None:
            batches = BatchSampler(data.sampler, size, data.drop_last)
        seed, part = self._seed % SIDES_APART, self._part  # sides draw the same, and are far from each other in it
        seed_everything(seed)
        holders = [data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
        for holder in holders:
            if isinstance(generator := getattr(holder, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        try:
            for number in itertools.count(seed):
                for holder in holders[1:]:
                    if callable(set_epoch := getattr(holder, "set_epoch", None)):
                        set_epoch(number)
                epoch, is_empty = iter(batches), True
                while drawn := _drawn(epoch):
                    self._runs[size] = run = max(self._runs.get(size, 0), run_length(drawn))
                    order = np.arange(len(drawn)) if run else _spread(np.arange(len(drawn)), len(drawn), BLOCK_BATCHES)
                    yield from (drawn[at] for at in np.roll(order, -int(part * len(drawn))))
                    is_empty, part = False, 0.0
                if is_empty:
                    return
        except Exception:
            self._own.clear()  # the next burst shall raise it, too
            raise


def _drawn(batches: Iterator[Any]) -> list[Any]:
    drawn, until, latest = list[Any](), time.thread_time() + DRAWN_S, time.monotonic() + MOST_DRAWN_S
    for each in batches:
        drawn.append(copy.copy(each))  # a sampler may fill one list again and again
        if time.thread_time() > until or time.monotonic() > latest:
            break
    return drawn


def run_length(drawn: Sequence[Any]) -> int:
    """How many of these, indices or batches of them, come from one place of a dataset before the next do; 0 for no such runs.

    Indices that are neighbours in the dataset are drawn soon after each other within a run, in whatever order. So hardly any
    neighbours are drawn on both sides of where two runs meet. What is read from its begin to its end has no such places.
    """
    try:
        first = np.asarray(drawn[0])
        if first.dtype.kind not in "iu" or first.ndim > 1:
            return 0
        indices = np.concatenate([np.ravel(each) for each in drawn]) if first.ndim else np.asarray(drawn)
        of_one, distinct = len(indices) / len(drawn), len(np.unique(indices))
    except Exception:  # keys of the user's own may raise anything
        return 0
    indices = indices[:distinct]  # an endless sampler gives many epochs
    if indices.dtype.kind not in "iu" or distinct < SHORTEST_RUN:
        return 0
    order = np.argsort(indices, kind="stable")
    apart, between = np.diff(indices[order]), np.abs(np.diff(order))
    is_near = (apart <= FAR_AWAY * np.median(apart)) & (between <= LONG_AGO * np.median(between))
    begin, end = np.sort([order[:-1][is_near], order[1:][is_near]], axis=0)
    crossing = np.cumsum(np.bincount(begin, minlength=distinct) - np.bincount(end, minlength=distinct))
    ends = np.flatnonzero(crossing <= min(THIN * np.median(crossing), THINNEST)) + 1
    runs = np.diff(ends, prepend=0)
    runs = runs[runs >= max(of_one, SHORTEST_RUN)]
    samples = float(np.median(runs)) if len(runs) > 1 else 0.0
    return round(samples / of_one) if samples > of_one else 0


@functools.lru_cache(maxsize=1)
def _shuffled(samples: int, epoch: int, stretch: int) -> Any:
    """One stretch of a shuffled epoch."""
    places = np.arange(stretch * STRETCH, min((stretch + 1) * STRETCH, samples))
    return np.random.default_rng((epoch, stretch)).permutation(_spread(places, samples, 1))


def _spread(positions: Any, length: int, block: int) -> Any:
    """What stands at these positions of an epoch whose whole blocks are read in another order."""
    blocks = length // block
    step = max(1, round(SPREAD * blocks))
    while math.gcd(step, blocks) > 1:  # it shall visit each block before any twice
        step += 1
    number, offset = np.divmod(positions, block)
    return np.where(number < blocks, number * step % max(blocks, 1) * block + offset, positions)


def seed_everything(seed: int) -> None:
    """Seed what datasets and samplers draw from: torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what they draw from is the global generator
