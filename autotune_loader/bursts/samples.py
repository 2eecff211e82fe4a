"""A sample that raises is named: its exception comes in the place of its batch, from a worker too, and ends the run.

What depends on the workers (a lack of memory or descriptors, CUDA after a fork) is no fault of a sample; nor is what raises in
a worker alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, default_collate, default_convert

from autotune_loader.bursts.failures import failure_of, is_of_user
from autotune_loader.bursts.files import SAMPLE_WRITES, refused_path
from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import Wrapped
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.measurement import Failure

MOST_NAMED = 4
"""Samples of a batch that cannot be collated."""
ENDS_TRAINING = "; training would end there too: mend that sample, or leave it out of the dataset"


class Raised(Exception):  # noqa: N818 - it stands for an error of the user's, and is none
    """What the samples of a batch raised, in the place of that batch."""

    def __init__(self, failure: Failure, keys: tuple[Any, ...], writes: bool) -> None:
        super().__init__(failure, keys, writes)
        self.failure = failure
        self.keys = keys
        """Of the samples that raise, alone or together; none in a stream."""
        self.writes = writes
        """Whether it was a file that bursts do not change."""

    @classmethod
    def of(cls, error: Exception, name: str, keys: Sequence[Any] = ()) -> Raised:
        """What takes the place of a batch; the error itself is raised where it is no fault of a sample."""
        if not is_of_user(error):
            raise error
        failure, path = failure_of(error, "batches"), refused_path(error)
        message = f"{name} raises {failure.message}" if path is None else SAMPLE_WRITES.format(sample=name, path=path)
        return cls(replace(failure, message=message), tuple(keys), path is not None)

    @property
    def ends_run(self) -> Failure:
        """The failure of a run that no configuration would help."""
        return self.failure if self.writes else replace(self.failure, message=self.failure.message + ENDS_TRAINING)

    def raises_in(self, data: DataSide) -> bool:
        """Whether the samples raise where this process reads them from `data`, too; False for a stream."""
        named, keys = named_samples(data), list(self.keys)
        with contextlib.suppress(Exception):
            read = keys and (named.dataset.__getitems__(keys) if data.is_batched else named.dataset[keys[0]])
            collate_fn: Any = named.collate_fn
            return bool(keys) and type(collate_fn(read)) is Raised
        return True


def good(batch: Any) -> Any:
    """The batch; raises what came in its place."""
    if isinstance(batch, Raised):
        raise batch
    return batch


def named_samples(data: DataSide) -> DataSide:
    """The same data side, whose exceptions are named."""
    collate_fn = NamedCollate(data.collate_fn or (default_collate if data.is_batched else default_convert))
    kind = NamedStream if data.is_iterable else NamedDataset
    return replace(data, collate_fn=collate_fn, dataset=kind(data.dataset))


class NamedDataset(Wrapped):
    """A map-style dataset whose exceptions say which sample raised."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        # As in `TracedDataset`: a failing look-up costs more than a clock reading.
        object.__setattr__(self, "_fetch_many", getattr(dataset, "__getitems__", None))

    def __getitem__(self, key: Any) -> Any:
        _keys[:] = [key]
        try:
            return self._inner[key]
        except Exception as error:
            return Raised.of(error, f"sample {_written(key)}", [key])

    def __getitems__(self, keys: list[Any]) -> Any:
        inner, fetch_many, key, _keys[:] = self._inner, self._fetch_many, None, keys
        try:
            return fetch_many(keys) if fetch_many else [inner[key := each] for each in keys]
        except Exception as error:
            name = _several(keys) if fetch_many else f"sample {_written(key)}"
            return Raised.of(error, name, keys if fetch_many else [key])

    def __len__(self) -> int:
        return len(self._inner)


class NamedStream(Wrapped, IterableDataset[Any]):
    """An IterableDataset whose exceptions say how many samples came before."""

    def __iter__(self) -> Iterator[Any]:
        delivered = 0
        _keys.clear()
        try:
            for sample in self._inner:
                yield sample
                delivered += 1
        except Exception as error:
            raised = Raised.of(error, f"the sample after {delivered:,} of a process's stream")
            while True:  # to the end of its batch
                yield raised


class NamedCollate:
    """A collate function whose exceptions name the samples that it was given, where these have keys."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = self.__wrapped__ = collate_fn  # the second is for whoever asks whose function it is

    def __call__(self, samples: Any) -> Any:
        last = samples[-1] if isinstance(samples, list) and samples else samples
        if type(last) is Raised:
            return last
        try:
            return self._collate_fn(samples)
        except Exception as error:
            return Raised.of(error, f"collate_fn of {_several(_keys)}" if _keys else "collate_fn", _keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn)),)


_keys: list[Any] = []
"""Of the batch that this process is making; a collate function is not told them."""


def _written(key: Any) -> str:
    """A key as it is named: a number is one, whatever library made it."""
    return repr(key.item() if getattr(key, "ndim", None) == 0 else key)


def _several(keys: Sequence[Any]) -> str:
    names = [_written(key) for key in keys[:MOST_NAMED]]
    return f"the batch of samples {', '.join(names)}" + (", ..." if len(keys) > MOST_NAMED else "")
