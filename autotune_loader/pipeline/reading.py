"""Which samples each burst of a run reads: such as no burst before it has read, as long as the dataset lasts.

What was read once lies in the page cache: a burst that reads it again measures memory, where training will measure the disk. So
all bursts of a run are one long reading of the dataset, and each takes up where the one before stopped:

    shuffled         one permutation
    in order         blocks of a few batches from all over the epoch in turn, so that an order by length harms no burst
    sampler of yours its one iterator, skipped forward by a part of the epoch between bursts where that is cheap
    stream           begun anew by each burst, with another seed, and in another epoch where it has `set_epoch`
"""

from __future__ import annotations

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
MOST_SKIPPED_S = 0.1
"""Seconds in which a sampler is skipped forward, before a burst begins."""
FRESH_STARTS = 64
"""A probe that had to be started anew begins in one of so many places of the epoch, since it does not know what was read."""
STREAM = (
    "the dataset is a stream, which every burst begins anew: if it always gives the same samples first, the disk was measured "
    "by the first burst only, and the others read from memory"
)


class Reading:
    """The order in which the bursts of one run read the samples; kept in the process that builds their loaders.

    Args:
        data: whose samples.
        seed: of the run; another one begins at another place.
    """

    def __init__(self, data: DataSide, seed: int = 0) -> None:
        self._data, self._seed, self._bursts = data, seed, 0
        samples = data.samples_per_epoch()
        has_plain_order = not (data.is_iterable or data.has_own_order)
        self._samples = samples if has_plain_order and samples else None
        """Of an epoch whose order is made here; None where a sampler of the user's makes it."""
        self._block = BLOCK_BATCHES * (data.batch_size or 1)
        blocks = (self._samples or 0) // self._block
        self._in_blocks, self._stride = blocks * self._block, _coprime_to(blocks, SPREAD)
        self._at = (seed % FRESH_STARTS) * (blocks // FRESH_STARTS) * self._block
        self._pass, self._permutation = 0, np.empty(0, np.int64)
        self._own: Iterator[Any] | None = None
        self._own_size: int | None = None
        self._is_skipped = False
        """Whether what it gave last is left out, to be read later."""

    @property
    def note(self) -> str | None:
        """What the user should know, where bursts cannot be kept from reading the same samples."""
        return (
            STREAM if self._data.is_iterable and not callable(getattr(self._data.dataset, "set_epoch", None)) else None
        )

    def begin(self, dataset: Any) -> int:
        """Another burst begins, on this dataset; returns its seed, for all that is random but the order."""
        self._bursts += 1
        set_epoch = getattr(dataset, "set_epoch", None)
        if self._data.is_iterable and callable(set_epoch):
            set_epoch(self._seed + self._bursts)
        if self._own is not None:
            self._skip(int((1 - SPREAD) * (self._data.batches_per_epoch(self._own_size) or 0)))
        return self._seed * 1000 + self._bursts

    def batches(self, size: int | None = None) -> Iterator[Any]:
        """Batches of indices without end; none where an epoch has none.

        Args:
            size: samples of each, where no batch sampler decides it; None gives one index at a time, which is no list.
        """
        if self._samples is None:
            return self._of_sampler(size)
        each = self._planned(size or 1)
        return each if size is not None else (indices[0] for indices in each)

    def _planned(self, size: int) -> Iterator[list[int]]:
        assert self._samples is not None
        end = self._samples - (self._samples % size if self._data.drop_last else 0)
        while end:
            first = -(-self._at // size) * size  # where a batch of training begins
            if first >= end:
                first, self._pass, self._permutation = 0, self._pass + 1, self._permutation[:0]
            self._at = min(first + size, end)
            yield self._indices(first, self._at)

    def _indices(self, first: int, last: int) -> list[int]:
        """What stands at these positions of the reading."""
        if self._data.is_shuffled:
            if not len(self._permutation):
                self._permutation = np.random.default_rng(self._pass).permutation(self._samples or 0)
            return list(self._permutation[first:last].tolist())
        block, offset = divmod(first, self._block)
        if last <= self._in_blocks and offset + last - first <= self._block:
            begin = block * self._stride * self._block % self._in_blocks + offset
            return list(range(begin, begin + last - first))
        return [self._place(position) for position in range(first, last)]  # across blocks, or behind the last whole one

    def _place(self, position: int) -> int:
        if position >= self._in_blocks:
            return position
        block, offset = divmod(position, self._block)
        return block * self._stride * self._block % self._in_blocks + offset

    def _of_sampler(self, size: int | None) -> Iterator[Any]:
        """What the user's own sampler gives, from burst to burst, epoch after epoch in the same order if it can be seeded."""
        if self._own is None or size != self._own_size:
            self._own, self._own_size = self._endless(size), size
        return self._own

    def _endless(self, size: int | None) -> Iterator[Any]:
        """Each batch of the epoch once, however it was skipped through, and then all of them again."""
        data, read = self._data, set[int]()
        while True:
            seed_everything(self._seed, *_generators_of(data))
            batches: Iterable[Any] = data.batch_sampler if data.batch_sampler is not None else data.sampler
            if size is not None and data.batch_sampler is None:
                batches = BatchSampler(data.sampler, size, data.drop_last)
            are_all_read = True
            try:
                for number, each in enumerate(batches):
                    if number in read:
                        continue
                    are_all_read = self._is_skipped = False
                    yield each
                    if not self._is_skipped:
                        read.add(number)
            except Exception:
                self._own = None  # the next burst shall raise it, too
                raise
            if are_all_read and not read:  # an epoch without a batch
                return
            if are_all_read:
                read.clear()

    def _skip(self, batches: int) -> None:
        until = time.monotonic() + MOST_SKIPPED_S
        for _ in itertools.islice(self._own or (), batches):
            self._is_skipped = True
            if time.monotonic() > until:
                return


def seed_everything(seed: int, *generators: torch.Generator) -> None:
    """Seed what datasets and samplers draw from: torch, Python, numpy, and these generators of their own."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what they draw from is the global generator
    for generator in generators:
        generator.manual_seed(seed)


def _generators_of(data: DataSide) -> list[torch.Generator]:
    """The user's generators that decide on the order of indices."""
    holders = (data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None))
    generators = (getattr(holder, "generator", None) for holder in holders)
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


def _coprime_to(blocks: int, share: float) -> int:
    """A step of about this share of so many blocks that visits each of them before any twice."""
    step = max(1, round(share * blocks))
    while math.gcd(step, blocks) > 1:
        step += 1
    return step
