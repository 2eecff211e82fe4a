"""Samples that raise, named: training ends at one, and a burst does too.

    a burst     sample 700 raises ─► it ends, by no fault of its configuration ─► it is run again without sample 700
    a run       a third sample raises ─► the run ends with its error

Nothing is replaced: what a burst reads is what training reads. What depends on the workers (a lack of memory or descriptors,
CUDA after a fork) is no fault of a sample; nor is what raises in a worker alone.
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, default_collate

from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import Wrapped
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.failures import StoppedError, failure_of, user_traceback, with_advice
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BadSample, Failure

T = TypeVar("T")
MOST_BAD = 3
"""So many different ones end a run."""
MOST_NAMED = 4
"""Samples of a batch that cannot be collated."""
SAMPLE = "sample "
_NAMED = re.compile(r"(?P<name>.+?) raises (?P<error>.*?)(?: \(samples (?P<keys>.*)\))?", re.DOTALL)


class SampleError(Exception):
    """A sample raised. The text says it all, since torch makes the exception anew from that on its way from a worker."""

    @classmethod
    def of(cls, name: str, error: Exception, keys: Collection[Any] = ()) -> SampleError:
        """The error that names what raised.

        Args:
            name: as "sample 700".
            error: what was raised.
            keys: of the samples that raised together; none where the name tells.
        """
        together = f" (samples {', '.join(map(written, keys))})" if keys else ""
        return cls(f"{name} raises {BadSample.of(name, error).error}{together}")

    @property
    def sample(self) -> BadSample:
        """What raised, in a few words, and what."""
        found = self._read()
        name, keys = found["name"], (found["keys"] or "").split(", ")
        if found["keys"]:
            name += f" of samples {', '.join(keys[:MOST_NAMED])}" + (", ..." if len(keys) > MOST_NAMED else "")
        return BadSample(name=name, error=found["error"])

    @property
    def keys(self) -> list[Any]:
        """Of the samples that raise, alone or together; none where they have no key that can be written."""
        try:
            return list(ast.literal_eval(f"[{self._written()}]"))
        except (ValueError, SyntaxError):
            return []

    @property
    def left_out(self) -> set[str]:
        """What `for_bursts` goes without from now on."""
        return set(map(written, self.keys)) or {self._written() or self.sample.name}

    def raises_in(self, data: DataSide) -> bool:
        """Whether the same is raised where this process reads the samples from `data`; what has no key is believed."""
        keys, collate_fn = self.keys, data.collate_fn or default_collate
        if not keys:
            return True
        try:
            samples = _read_from(data.dataset, keys)
            if self._read()["keys"] and data.is_batched:
                collate_fn(samples)
        except Exception:
            return True
        return False

    def _written(self) -> str:
        found = self._read()
        return found["keys"] or (found["name"].removeprefix(SAMPLE) if found["name"].startswith(SAMPLE) else "")

    def _read(self) -> re.Match[str]:
        # Torch wraps a worker's exception in its whole traceback, whose last line it is.
        line = [line for line in str(self).splitlines() if line.strip()][-1]
        found = _NAMED.fullmatch(line.rpartition(f"{type(self).__name__}: ")[2])
        assert found is not None, line
        return found


def written(key: Any) -> str:
    """A key as it is named: a number is one, whatever library made it."""
    return repr(key.item() if getattr(key, "ndim", None) == 0 else key)


def _read_from(dataset: Any, keys: list[Any]) -> Any:
    fetch_many = getattr(dataset, "__getitems__", None)
    return fetch_many(keys) if fetch_many else [dataset[key] for key in keys]


def _raising(dataset: Any, keys: list[Any]) -> list[Any]:
    """Of keys that raise together the first that raises alone, if any does."""
    for key in keys:
        try:
            _read_from(dataset, [key])
        except Exception:
            return [key]
    return []


_END = object()
_keys: list[Any] = []
"""Of the batch that this process is making; a collate function is not told them."""


class _Naming:
    """Within the block, what is the fault of a sample is raised as a `SampleError`.

    Args:
        tell: makes it of what was raised.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[Exception], SampleError]) -> None:
        self._tell = tell

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (StoppedError, MemoryError)):
            raise self._tell(error) from error


class NamingDataset(Wrapped):
    """A map-style dataset whose exceptions say which sample raised."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        # As in `TracedDataset`: a failing look-up costs more than a clock reading.
        object.__setattr__(self, "_fetch_many", getattr(dataset, "__getitems__", None))

    def __getitem__(self, key: Any) -> Any:
        with _Naming(lambda error: SampleError.of(SAMPLE + written(key), error)):
            return self._inner[key]

    def __getitems__(self, keys: list[Any]) -> Any:
        inner, fetch_many, _keys[:] = self._inner, self._fetch_many, keys
        key: Any = None

        def tell(error: Exception) -> SampleError:
            raising = [key] if not fetch_many else _raising(inner, keys)
            if not raising:
                return SampleError.of("__getitems__", error, keys)
            return SampleError.of(SAMPLE + written(raising[0]), error)

        with _Naming(tell):
            return fetch_many(keys) if fetch_many else [inner[key := each] for each in keys]

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
        samples = iter(self._inner)
        naming = _Naming(lambda error: SampleError.of(f"the sample after {delivered:,} of a process's stream", error))
        while True:
            try:
                with naming:
                    sample = next(samples, _END)
            except SampleError:
                if self._ends and delivered:
                    return
                raise
            if sample is _END:
                return
            delivered += 1
            yield sample


class NamingCollate:
    """A collate function whose exceptions name the samples that it was given, where these have keys."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        if not _keys:
            return self._collate_fn(samples)
        with _Naming(lambda error: SampleError.of("collate_fn", error, _keys)):
            return self._collate_fn(samples)

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
            elif good := [key for key in each if written(key) not in self._without]:
                yield good if len(good) < len(each) else each

    def __len__(self) -> int:
        return len(self._inner)


def for_bursts(data: DataSide, without: Collection[str]) -> DataSide:
    """The same data side, whose exceptions are named, without the samples that are known to raise.

    Args:
        data: the user's parts.
        without: keys as they are written; of a stream anything, once it is known that it raises.
    """
    if data.is_batched:
        data = replace(data, collate_fn=NamingCollate(data.collate_fn or default_collate))
    if data.is_iterable:
        return replace(data, dataset=NamingStream(data.dataset, ends=bool(without)))
    data = replace(data, dataset=NamingDataset(data.dataset))
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
                failure = self._leave_out(error, again)
            if failure is not None:
                return failure

    def _leave_out(self, error: SampleError, again: Callable[[], DataSide] | None) -> Failure | None:
        """Go without a sample from now on; a failure where it is not the sample's fault, or cannot be left out."""
        bad = error.sample
        failure = replace(failure_of(error, "batches"), traceback=user_traceback(error.__cause__ or error))
        if bad.name in self.by_name:
            return failure
        if again is not None and not error.raises_in(again()):
            message = f"{bad.name} raises {bad.error} in a worker, and not when it is read again alone"
            return replace(failure, message=message, retryable=True)
        self.by_name[bad.name] = bad
        self.left_out |= error.left_out
        first, *others = self.by_name.values()
        also = f", and so do {' and '.join(each.name for each in others)}" if others else ""
        told = with_advice(f"{first.name} raises {first.error}{also}", error)
        self.ends_run = WorkloadError(told, failure.traceback or "")
        if len(self.by_name) >= MOST_BAD:
            raise self.ends_run from None  # its text has all, without secrets
        return None
