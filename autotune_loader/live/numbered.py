"""The user's dataset and collate function behind index batches that carry their number.

feed ── (number, epoch seed, indices) ── dataset ── (number, samples) ── collate ── (batch, fetch, number) ── loop

The number says which batch has arrived; with the epoch's seed it says which random numbers were its own.
"""

from __future__ import annotations

from typing import Any

from autotune_loader.live.seeds import LoopSeeds, WorkerSeeds
from autotune_loader.pipeline.tracing import TracedCollate, TracedDataset, dumps, loads

Item = tuple[int, int, Any]
"""number of the batch in its epoch, seed of the epoch, indices (one index where the dataset makes the batches)"""
Seeds = WorkerSeeds | LoopSeeds | None
"""None leaves the random numbers to torch."""


class NumberedDataset(TracedDataset):
    """A map-style dataset that is asked for numbered batches; single samples are had as ever."""

    def __init__(self, dataset: Any, seeds: Seeds) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_seeds", seeds)

    def __getitems__(self, item: Any) -> Any:
        return self._numbered(item, super().__getitems__)

    def _numbered(self, item: Item, fetch: Any) -> tuple[int, Any]:
        number, epoch_seed, indices = item
        seeds: Seeds = self._seeds
        if seeds is None:
            return number, fetch(indices)
        seeds.begin(epoch_seed, number)
        try:
            return number, fetch(indices)
        except BaseException:
            seeds.end()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._seeds)),)


class NumberedSamples(NumberedDataset):
    """The same for a dataset that makes its batches itself: what it is asked for by number is one index."""

    def __getitem__(self, item: Any) -> Any:
        return self._numbered(item, super().__getitem__)


class NumberedCollate(TracedCollate):
    """The user's collate function; what it returns travels with the batch's history and number."""

    def __init__(self, collate_fn: Any, batched: bool, seeds: Seeds = None) -> None:
        super().__init__(collate_fn, batched)
        self._seeds = seeds

    def __call__(self, numbered: Any) -> Any:
        number, samples = numbered
        try:
            return *super().__call__(samples), number
        finally:
            if self._seeds is not None:
                self._seeds.end()

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn, self._batched, self._seeds)),)


class StreamCollate(TracedCollate):
    """The same for an IterableDataset, whose batches have no number."""

    def __call__(self, samples: Any) -> Any:
        return *super().__call__(samples), None
