"""The user's dataset and collate function behind index batches that carry their number.

feed ── (number, epoch seed, indices) ── dataset ── (number, samples) ── collate ── (batch, fetch, number) ── loop

The number says which batch has arrived; with the epoch's seed it says which random numbers were its own. Without workers
one object does all of it: what is done between two batches finds the caches cold, so that each step costs more than it seems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from autotune_loader.live.seeds import LoopSeeds, WorkerSeeds
from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import TracedCollate, TracedDataset

Item = tuple[int, int, Any]
"""number of the batch in its epoch, seed of the epoch, indices (one index where the dataset makes the batches)"""


class BatchesInLoop(IterableDataset[Any]):
    """A map-style dataset's batches, made by the training process itself; one that raises is followed by the next.

    It takes the place of torch's iterator, which without workers would do the same and tell the profiler, for 7 us a batch.

    Args:
        dataset: of the user.
        collate_fn: of the user.
        batched: whether samples are collated; False where the dataset makes the batches.
        feed: numbered index batches.
        seeds: None leaves the random numbers to torch.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        batched: bool,
        feed: Iterator[Item],
        seeds: LoopSeeds | None,
    ) -> None:
        traced = TracedDataset(dataset)
        self._fetch = traced.__getitems__ if batched else traced.__getitem__
        self._collate = TracedCollate(collate_fn, batched)
        self._feed, self._seeds = feed, seeds

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number, epoch_seed, indices = next(self._feed)
        if self._seeds is None:
            return *self._collate(self._fetch(indices)), number
        self._seeds.begin(epoch_seed, number)
        try:
            return *self._collate(self._fetch(indices)), number
        finally:
            self._seeds.end()


class NumberedDataset(TracedDataset):
    """A map-style dataset in a worker that is asked for numbered batches; single samples are had as ever.

    Args:
        dataset: of the user.
        seeds: None leaves the random numbers to torch.
    """

    def __init__(self, dataset: Any, seeds: WorkerSeeds | None) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_seeds", seeds)

    def __getitems__(self, item: Any) -> Any:
        return self._numbered(item, super().__getitems__)

    def _numbered(self, item: Item, fetch: Any) -> tuple[int, Any]:
        number, epoch_seed, indices = item
        seeds: WorkerSeeds | None = self._seeds
        if seeds is not None:
            seeds.begin(epoch_seed, number)
        return number, fetch(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._seeds)),)


class NumberedSamples(NumberedDataset):
    """The same for a dataset that makes its batches itself: what it is asked for by number is one index."""

    def __getitem__(self, item: Any) -> Any:
        return self._numbered(item, super().__getitem__)


class NumberedCollate(TracedCollate):
    """The user's collate function; what it returns travels with the batch's history and number."""

    def __call__(self, numbered: Any) -> Any:
        number, samples = numbered
        return *super().__call__(samples), number


class StreamCollate(TracedCollate):
    """The same for an IterableDataset, whose batches have no number."""

    def __call__(self, samples: Any) -> Any:
        return *super().__call__(samples), None
