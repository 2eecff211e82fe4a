"""Datasets and loaders of tests: what a sample is, and how many there are, is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset


class Rows(Dataset[Any]):
    """A map-style dataset: sample `index` is `get(index)`."""

    def __init__(self, get: Callable[[int], Any], n: int) -> None:
        self.get, self.n = get, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


class Stream(IterableDataset[Any]):
    """An iterable-style dataset: the samples are `get(0)` to `get(n - 1)`, in each worker."""

    def __init__(self, get: Callable[[int], Any], n: int) -> None:
        self.get, self.n = get, n

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, range(self.n))


class Loader:
    """An object that gives batches, and is no DataLoader: `batches` is called for each epoch."""

    def __init__(self, batches: Callable[[], Iterable[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches())
