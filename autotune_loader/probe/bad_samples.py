"""Samples that raise, named: training ends at one, and a burst does too.

    a burst     sample 700 raises ─► it failed, by no fault of its configuration ─► it is run again without sample 700
    a run       a third sample raises ─► the run ends with its error

Nothing is replaced: what a burst reads is what training reads. What depends on the workers (a lack of memory or descriptors,
CUDA after a fork) is no fault of a sample; nor is what raises in a worker alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, default_collate

from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import Wrapped
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.failures import StoppedError
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure

MOST_BAD = 3
"""So many different ones end a run."""
REMEMBERED = 4096
"""Batches whose keys are known: as many as any workers have ahead."""
MOST_NAMED = 4
"""Of a batch that cannot be collated."""
_NAMED = re.compile(r"(?P<name>samples? .+?|the sample after [\d,]+ of .+?) raises (?P<error>.+)", re.DOTALL)


class SampleError(Exception):
    """A sample raised; the message names it. Torch makes it anew from its message, on its way from a worker."""

    @classmethod
    def of(cls, name: str, error: Exception) -> SampleError:
        lines = str(error).splitlines() or [""]
        return cls(f"{name} raises {type(error).__name__}: {lines[0]}")


def bad_sample_of(failure: Failure) -> BadSample | None:
    """The sample that a burst failed by; None where it was something else."""
    found = _NAMED.fullmatch(failure.message) if failure.kind == "user_exception" else None
    return None if found is None else BadSample(name=found["name"], error=found["error"])


class NamingDataset(Wrapped):
    """A map-style dataset whose exceptions say which sample raised."""

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._inner[key]
        except StoppedError:
            raise
        except Exception as error:
            raise SampleError.of(f"sample {key!r}", error) from error

    def __getitems__(self, keys: list[Any]) -> Any:
        inner = self._inner
        _keys[:] = keys
        fetch_many = getattr(inner, "__getitems__", None)
        key: Any = None
        try:
            if fetch_many:
                return fetch_many(keys)
            samples = []
            for key in keys:
                samples.append(inner[key])
            return samples
        except StoppedError:
            raise
        except Exception as error:
            name = f"sample {key!r}" if not fetch_many else _named(_raising(fetch_many, keys))
            raise SampleError.of(name, error) from error

    def __len__(self) -> int:
        return len(self._inner)


def _raising(fetch_many: Callable[[list[Any]], Any], keys: list[Any]) -> list[Any]:
    """Of keys that raise together the first that raises alone; all, where none does."""
    for key in keys:
        try:
            fetch_many([key])
        except Exception:
            return [key]
    return keys


_keys: list[Any] = []
"""Of the batch that this process is making; a collate function is not told them."""


def _named(keys: list[Any]) -> str:
    shown = ", ".join(map(repr, keys[:MOST_NAMED]))
    return f"sample {shown}" if len(keys) == 1 else f"samples {shown}" + (", ..." if len(keys) > MOST_NAMED else "")


class NamingStream(Wrapped, IterableDataset[Any]):
    """An IterableDataset whose exceptions say how many samples came before."""

    def __iter__(self) -> Iterator[Any]:
        delivered = 0
        _keys.clear()
        try:
            for sample in self._inner:
                yield sample
                delivered += 1
        except StoppedError:
            raise
        except Exception as error:
            raise SampleError.of(f"the sample after {delivered:,} of a process's stream", error) from error


class NamingCollate:
    """A collate function whose exceptions name the samples that it was given, where these have names."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        try:
            return self._collate_fn(samples)
        except Exception as error:
            if not _keys:
                raise
            raise SampleError.of(f"{_named(_keys)} in collate_fn", error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn)),)


class Order:
    """The user's order of indices, without those that are known to raise, and in smaller batches where whole ones are slow.

    Args:
        inner: a sampler, or a sampler of batches.
        without: names of bad samples, which grow.
        at_most: samples of a batch; None leaves batches as they are.
    """

    def __init__(self, inner: Any, without: dict[str, BadSample], at_most: int | None, *, is_batched: bool) -> None:
        self._inner = inner
        self._without = without
        self._at_most = at_most
        self._is_batched = is_batched
        self.latest: deque[Any] = deque(maxlen=REMEMBERED)
        """Keys, or lists of them, as they were handed out."""
        self.whole = 1
        """Samples of the first batch as the user's order has it."""

    def __iter__(self) -> Iterator[Any]:
        for number, each in enumerate(self._inner):
            if number == 0 and self._is_batched:
                self.whole = len(each)
            for item in self._batches_of(each) if self._is_batched else [each]:
                if not self._is_batched and self._is_bad(item):
                    continue
                self.latest.append(item)
                yield item

    def __len__(self) -> int:
        return len(self._inner)

    def _batches_of(self, batch: Any) -> Iterator[Any]:
        if not self._without and self._at_most is None:
            yield batch
            return
        good = [key for key in batch if not self._is_bad(key)]
        size = self._at_most or max(1, len(good))
        for begin in range(0, len(good), size):
            yield good[begin : begin + size]

    def _is_bad(self, key: Any) -> bool:
        return bool(self._without) and f"sample {key!r}" in self._without

    def key_of(self, name: str) -> list[Any]:
        """The key of a sample that was handed out, by its name, as a list; empty where it is not known any more."""
        for item in reversed(self.latest):
            for key in item if self._is_batched else [item]:
                if f"sample {key!r}" == name:
                    return [key]
        return []


def for_bursts(
    data: DataSide, config: LoaderConfig, without: dict[str, BadSample], at_most: int | None
) -> tuple[DataSide, Order | None]:
    """The same data side, whose exceptions are named, and its order; None of a stream.

    Args:
        data: the user's parts.
        config: may set another batch size.
        without: bad samples by name; they are left out.
        at_most: samples of a batch, where whole ones take too long.
    """
    collate_fn = NamingCollate(data.collate_fn or default_collate) if data.is_batched else data.collate_fn
    if data.is_iterable:
        size = data.batch_size if at_most is None or data.batch_size is None else min(at_most, data.batch_size)
        return replace(data, dataset=NamingStream(data.dataset), collate_fn=collate_fn, batch_size=size), None
    named = replace(data, dataset=NamingDataset(data.dataset), collate_fn=collate_fn)
    if not data.is_batched:
        order = Order(data.sampler, without, None, is_batched=False)
        return replace(named, sampler=order), order
    batches = data.batch_sampler
    if batches is None:
        drop_last = data.drop_last if config.drop_last is None else config.drop_last
        batches = BatchSampler(data.sampler, config.batch_size or data.batch_size or 1, drop_last)
    order = Order(batches, without, at_most if config.batch_size is None else None, is_batched=True)
    return replace(named, batch_size=None, sampler=None, batch_sampler=order), order


def raises_alone(dataset: Any, keys: list[Any]) -> bool:
    """Whether the same sample raises in this process; what is not known by key is believed."""
    fetch_many = getattr(dataset, "__getitems__", None)
    try:
        for key in keys:
            fetch_many([key]) if fetch_many else dataset[key]
    except Exception:
        return True
    return not keys
