"""Which samples each burst of a run reads: such as no burst before it has read, as long as the dataset lasts.

What was read once lies in the page cache: a burst that reads it again measures memory, where training will measure the disk. So
all bursts of a run are one long reading of the dataset, and each takes up where the one before stopped:

    shuffled         one permutation, of a long epoch in stretches, each of samples from all over it
    in order         blocks of a few batches from all over the epoch in turn, so that an order by length harms no burst
    sampler of yours the same blocks, of what it gives in a tenth of a second
    stream           begun anew by each burst, with another seed, and in another epoch where it has `set_epoch`
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
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
DRAWN_S = 0.1
"""Seconds in which a sampler is asked for what will be read next."""
FRESH_STARTS = 64
"""A probe that had to be started anew begins in one of so many places of the epoch, since it does not know what was read."""
STREAM = (
    "the dataset is a stream, which every trial restarts: if it always gives the same samples first, the disk was measured "
    "by the first trial only, and the others read from memory"
)


class Reading:
    """The order in which the bursts of one run read the samples; kept in the process that builds their loaders.

    A run with another seed begins at another place.
    """

    def __init__(self, data: DataSide, seed: int = 0) -> None:
        self._data, self._seed, self._bursts = data, seed, 0
        self._has_own_order = data.is_iterable or data.has_own_order or not data.samples_per_epoch()
        self._samples = min(data.samples_per_epoch() or 0, MOST_SAMPLES)
        self._block = BLOCK_BATCHES * (data.batch_size or 1)
        self._at = (seed % FRESH_STARTS) * (self._samples // self._block // FRESH_STARTS) * self._block
        self._pass = 0
        self._begun = self._pass, self._at
        self._own: dict[int | None, Iterator[Any]] = {}
        """What the user's sampler gives, by samples of a batch."""
        self._given: dict[int | None, list[Any]] = {}
        """What it gave to the latest burst."""
        self._again: dict[int | None, list[Any]] = {}
        """What it shall give to the next one first."""

    @property
    def note(self) -> str | None:
        """What the user should know, where bursts cannot be kept from reading the same samples."""
        is_told_epoch = callable(getattr(self._data.dataset, "set_epoch", None))
        return STREAM if self._data.is_iterable and not is_told_epoch else None

    def begin(self, dataset: Any) -> int:
        """Another burst begins, on this dataset; returns its seed, for all that is random but the order."""
        self._bursts += 1
        self._begun, self._given = (self._pass, self._at), {}
        set_epoch = getattr(dataset, "set_epoch", None)
        if self._data.is_iterable and callable(set_epoch):
            set_epoch(self._seed + self._bursts)
        return self._seed * 1000 + self._bursts

    @property
    def place(self) -> Any:
        """Where the next burst goes on, for a reading of the same data in another process."""
        return self._bursts, self._begun, (self._pass, self._at), self._given

    def go_on(self, place: Any) -> None:
        """Take up where a reading in another process has stopped; a sampler of the user's goes on by itself here."""
        self._bursts, self._begun, (self._pass, self._at), self._given = place

    def rewind(self) -> None:
        """Let the next burst read what the latest one has read; a stream is begun with the same seed."""
        self._bursts, self._again = max(self._bursts - 1, 0), self._given
        self._pass, self._at = self._begun

    def batches(self, size: int | None = None) -> Iterator[Any]:
        """Batches of indices without end, or single indices for no size; none where an epoch has none."""
        if not self._has_own_order:
            each = self._planned(size or 1)
            return each if size is not None else (indices[0] for indices in each)
        return self._noted(size)

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
                yield _shuffled(self._samples, self._pass, stretch)[begin : begin + self._at - first].tolist()
            else:
                yield _spread(np.arange(first, self._at), self._samples, self._block).tolist()

    def _noted(self, size: int | None) -> Iterator[Any]:
        again, self._again = self._again.pop(size, []), {}
        given = self._given[size] = list[Any]()
        for each in itertools.chain(again, self._own.setdefault(size, self._of_sampler(size))):
            given.append(each)
            yield each

    def _of_sampler(self, size: int | None) -> Iterator[Any]:
        """What the user's own sampler gives, epoch after epoch."""
        data = self._data
        batches: Iterable[Any] = data.batch_sampler if data.batch_sampler is not None else data.sampler
        if size is not None and data.batch_sampler is None:
            batches = BatchSampler(data.sampler, size, data.drop_last)
        seed_everything(self._seed)
        for holder in (data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)):
            if isinstance(generator := getattr(holder, "generator", None), torch.Generator):
                generator.manual_seed(self._seed)
        try:
            is_empty = False
            while not is_empty:
                epoch, is_empty = iter(batches), True
                while drawn := _drawn(epoch):
                    yield from (drawn[at] for at in _spread(np.arange(len(drawn)), len(drawn), BLOCK_BATCHES))
                    is_empty = False
        except Exception:
            self._own.clear()  # the next burst shall raise it, too
            raise


def _drawn(batches: Iterator[Any]) -> list[Any]:
    drawn, until = list[Any](), time.monotonic() + DRAWN_S
    for each in batches:
        drawn.append(copy.copy(each))  # a sampler may fill one list again and again
        if time.monotonic() > until:
            break
    return drawn


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
