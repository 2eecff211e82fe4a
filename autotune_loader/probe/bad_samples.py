"""Samples that raise, named: training ends at one, and a burst does too.

    a burst     sample 700 raises ─► it ends, by no fault of its configuration ─► it is run again without sample 700
    a run       a third sample raises ─► the run ends with its error

Nothing is replaced: what a burst reads is what training reads. What depends on the workers (a lack of memory or descriptors,
CUDA after a fork) is no fault of a sample; nor is what raises in a worker alone.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, default_collate, default_convert

from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import Wrapped
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.failures import failure_of, is_of_dataset
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BadSample, Failure

T = TypeVar("T")
MOST_BAD = 3
"""So many different ones end a run."""
MOST_NAMED = 4
"""Samples of a batch that cannot be collated."""


class SampleError(Exception):
    """What a sample raised. It comes in the place of a batch, from a worker too, and is raised where a batch is taken."""

    def __init__(self, bad: BadSample, keys: tuple[Any, ...], failure: Failure) -> None:
        super().__init__(bad, keys, failure)
        self.bad = bad
        self.keys = keys
        """Of the samples that raise, alone or together; none in a stream."""
        self.failure = failure

    @classmethod
    def of(cls, error: Exception, name: str, keys: Sequence[Any] = ()) -> SampleError:
        """What takes the place of a batch; the error itself is raised where it is no fault of a sample."""
        if not is_of_dataset(error):
            raise error
        failure = failure_of(error, "batches")
        told = replace(failure, message=f"{name} raises {failure.message}")
        return cls(BadSample(name=name, error=failure.message), tuple(keys), told)

    def raises_in(self, data: DataSide) -> bool:
        """Whether the samples raise where this process reads them from `data`; what has no key is believed."""
        data, keys = for_bursts(data, ()), list(self.keys)
        with contextlib.suppress(Exception):
            read = keys and (data.dataset.__getitems__(keys) if data.is_batched else data.dataset[keys[0]])
            return not keys or isinstance((data.collate_fn or default_convert)(read), SampleError)
        return True


def good(batch: T) -> T:
    """The batch; raises what came in its place."""
    if isinstance(batch, SampleError):
        raise batch
    return batch


def written(key: Any) -> str:
    """A key as it is named: a number is one, whatever library made it."""
    return repr(key.item() if getattr(key, "ndim", None) == 0 else key)


def _raises(dataset: Any, key: Any) -> bool:
    try:
        dataset.__getitems__([key])
    except Exception:
        return True
    return False


def _several(keys: Sequence[Any]) -> str:
    names = [written(key) for key in keys[:MOST_NAMED]]
    return f" of samples {', '.join(names)}" + (", ..." if len(keys) > MOST_NAMED else "")


_keys: list[Any] = []
"""Of the batch that this process is making; a collate function is not told them."""


class NamingDataset(Wrapped):
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
            return SampleError.of(error, f"sample {written(key)}", [key])

    def __getitems__(self, keys: list[Any]) -> Any:
        inner, fetch_many, key, _keys[:] = self._inner, self._fetch_many, None, keys
        try:
            return fetch_many(keys) if fetch_many else [inner[key := each] for each in keys]
        except Exception as error:
            alone = [key] if not fetch_many else [each for each in keys if _raises(inner, each)]
            name = f"sample {written(alone[0])}" if alone else f"__getitems__{_several(keys)}"
            return SampleError.of(error, name, alone[:1] or keys)

    def __len__(self) -> int:
        return len(self._inner)


class NamingStream(Wrapped, IterableDataset[Any]):
    """An IterableDataset whose exceptions say how many samples came before.

    Args:
        dataset: the user's.
        ends: whether it ends where it raises, if it has delivered something: it is known by then.
    """

    def __init__(self, dataset: Any, ends: bool) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_ends", ends)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._ends)),)

    def __iter__(self) -> Iterator[Any]:
        delivered = 0
        _keys.clear()
        try:
            for sample in self._inner:
                yield sample
                delivered += 1
        except Exception as error:
            bad = SampleError.of(error, f"the sample after {delivered:,} of a process's stream")
            while not (self._ends and delivered):
                yield bad  # to the end of its batch


class NamingCollate:
    """A collate function whose exceptions name the samples that it was given, where these have keys."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = self.__wrapped__ = collate_fn  # the second is for whoever asks whose function it is

    def __call__(self, samples: Any) -> Any:
        last = samples[-1] if isinstance(samples, list) and samples else samples
        if type(last) is SampleError:
            return last
        try:
            return self._collate_fn(samples)
        except Exception as error:
            return SampleError.of(error, f"collate_fn{_several(_keys) if _keys else ''}", _keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn)),)


class Order:
    """The user's order of keys, or of batches of keys, without those that are known to raise.

    Args:
        inner: a sampler, or a sampler of batches; its attributes are this one's.
        without: keys as they are written.
    """

    def __init__(self, inner: Any, without: Collection[str]) -> None:
        self._inner = inner
        self._without = without

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        for each in self._inner:
            if written(each) in self._without:
                continue
            if not isinstance(each, (list, tuple)):
                yield each
            elif left := [key for key in each if written(key) not in self._without]:
                yield left if len(left) < len(each) else each

    def __len__(self) -> int:
        return len(self._inner)


def for_bursts(data: DataSide, without: Collection[str]) -> DataSide:
    """The same data side, whose exceptions are named, without the samples that are known to raise.

    Args:
        data: the user's parts.
        without: keys as they are written; of a stream anything, once it is known that it raises.
    """
    collate_fn = NamingCollate(data.collate_fn or (default_collate if data.is_batched else default_convert))
    if data.is_iterable:
        return replace(data, collate_fn=collate_fn, dataset=NamingStream(data.dataset, ends=bool(without)))
    data = replace(data, collate_fn=collate_fn, dataset=NamingDataset(data.dataset))
    if not without:
        return data
    if data.batch_sampler is not None:
        return replace(data, batch_sampler=Order(data.batch_sampler, without))
    return replace(data, sampler=Order(data.sampler, without))


class BadSamples:
    """Those of one run: named, left out from then on, and the run's end once there are too many."""

    def __init__(self) -> None:
        self.by_name: dict[str, BadSample] = {}
        self.left_out: set[str] = set()
        """Keys of the samples that are left out, as they are written."""
        self.ends_run: WorkloadError | None = None
        """What is raised once too many samples raise, or none is left."""

    def gone_without(self, run: Callable[[], T | Failure], again: Callable[[], DataSide] | None) -> T | Failure:
        """What `run` returns once no sample raises in it.

        Args:
            run: a burst, or the first batch.
            again: what this process may read a sample from, to see whether it raises here, too; None where it read it itself.

        Raises:
            WorkloadError: so many raise that training would hardly begin.
        """
        while True:
            try:
                return run()
            except SampleError as error:
                traceback.clear_frames(error.__traceback__)
                bad, failure = error.bad, error.failure
                if bad.name in self.by_name:
                    return failure  # it cannot be left out
                if again is not None and not error.raises_in(again()):
                    message = f"{bad.name} raises {bad.error} in a worker, and not when it is read again alone"
                    return replace(failure, message=message, retryable=True)
                self.by_name[bad.name] = bad
                self.left_out |= set(map(written, error.keys)) or {bad.name}
                first, *others = self.by_name.values()
                also = f", and so do {' and '.join(each.name for each in others)}" if others else ""
                self.ends_run = WorkloadError(f"{first.name} raises {first.error}{also}", failure.traceback or "")
                if len(self.by_name) >= MOST_BAD:
                    raise self.ends_run from None  # its text has all, without secrets
