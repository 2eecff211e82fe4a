"""The user's samples as bursts read them: one that raises has another in its place, and a slow fetch is cut short.

    training    700 raises ─► the run ends there           a batch of 16 s ─► takes 16 s
    a burst     another is read instead, and it is noted   2 s are read, the rest is what was read, again; how long that
                                                           would have taken is in the batch's trace

A sample that raises is the dataset's fault, whoever reads it. What depends on the workers is raised as it is: lack of memory
or descriptors, CUDA after a fork, and what raises for most of the first samples that a process reads.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate

from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import Wrapped, batch_begun, note_unread
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.failures import is_of_dataset
from autotune_loader.values.measurement import BadSample

if TYPE_CHECKING:
    from autotune_loader.probe.step import TrainingStep

SLOW_FETCH_S = 1.0
"""A batch that takes longer is cut short, if the rest of it would take as long again."""
SLOW_CALL_S = 0.25
"""Where `__getitems__` takes longer for one sample, two short calls tell how long all would take."""
FEW = 4
"""Samples of these two calls: one, and three."""
MOST_NOTED = 20
"""Of each process in each burst: enough to name."""
ODD_SHARE = 8
"""A batch that cannot be collated may lose one sample in so many, and a burst one batch that the step raises for."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What raised in a burst."""

    keys: tuple[Any, ...]
    """That are enough to see it again, the one at fault last; none of a stream."""
    name: str
    error: str
    kind: str
    """Its class."""

    @property
    def sample(self) -> BadSample:
        return BadSample(name=self.name, error=self.error)


class Notebook:
    """Where the processes of bursts note what raised: files in a folder, which outlive a worker that is killed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def note(self, keys: tuple[Any, ...], name: str, error: Exception) -> None:
        lines = str(error).splitlines() or [""]
        raised = Raised(keys, name, f"{type(error).__name__}: {lines[0]}", type(error).__name__)
        with contextlib.suppress(Exception), (Path(self._folder) / f"raised-{os.getpid()}").open("ab") as file:
            file.write(pickle.dumps(raised))

    def taken(self) -> list[Raised]:
        """What was noted since this was asked last."""
        found: list[Raised] = []
        for path in sorted(Path(self._folder).glob("raised-*")):
            with path.open("rb") as file, contextlib.suppress(Exception):  # until its end, or where a worker was killed
                while True:
                    found.append(pickle.load(file))  # noqa: S301 - our own processes wrote it
            path.unlink(missing_ok=True)
        return found


@dataclass(slots=True)
class _Reader:
    """What one process knows of its reading. It travels to workers empty."""

    notebook: Notebook
    is_paced: bool
    is_careful: bool = False
    """Whether samples are read one by one, each with its time or its exception."""
    good: Any = None
    """Key of a sample that could be read."""
    has_good: bool = False
    noted: int = 0

    def note(self, keys: tuple[Any, ...], name: str, error: Exception) -> None:
        self.noted += 1
        if self.noted <= MOST_NOTED:
            self.notebook.note(keys, name, error)


_keys: list[Any] = []
"""Of the batch that this process is making, sample by sample; a collate function is not told them."""


class BurstDataset(Wrapped):
    """A map-style dataset of which no sample raises, as long as others do not."""

    def __init__(self, dataset: Any, notebook: Notebook, is_paced: bool) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reader", _Reader(notebook, is_paced, is_careful=is_paced))
        object.__setattr__(self, "_fetch_many", getattr(dataset, "__getitems__", None))

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._inner, self._reader.notebook, self._reader.is_paced)),)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, key: Any) -> Any:
        reader = self._reader
        try:
            sample = self._inner[key]
        except Exception as error:
            if not reader.has_good or not is_of_dataset(error):
                raise
            reader.note((key,), f"sample {key!r}", error)
            return self._inner[reader.good]
        reader.good, reader.has_good = key, True
        return sample

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        _keys[:] = keys
        reader = self._reader
        if reader.is_careful and not self._fetch_many:
            return self._one_by_one(keys)
        try:
            inner = self._inner
            if reader.is_paced and self._fetch_many and len(keys) > FEW:
                samples = self._in_parts(keys)
            else:
                samples = self._fetch_many(keys) if self._fetch_many else [inner[key] for key in keys]
        except Exception as error:
            if not is_of_dataset(error):
                raise
            reader.is_careful = True  # so that no other batch is fetched twice
            return self._one_by_one(keys)
        reader.good, reader.has_good = keys[-1], True
        return samples

    def _in_parts(self, keys: list[Any]) -> list[Any]:
        """A batch of a dataset that fetches many at once, cut short where each sample adds much to a call."""
        begun = time.monotonic()
        first = self._fetch_many(keys[:1])
        first_s = time.monotonic() - begun
        if not isinstance(first, list):
            whole: list[Any] = self._fetch_many(keys)
            return whole
        if first_s < SLOW_CALL_S:
            return [*first, *self._fetch_many(keys[1:])]
        read = [*first, *self._fetch_many(keys[1:FEW])]
        read_s = time.monotonic() - begun
        sample_s = max(0.0, (read_s - 2 * first_s) / (FEW - 2))
        call_s = max(0.0, first_s - sample_s)
        unread_s = call_s + len(keys) * sample_s - read_s
        if unread_s <= SLOW_FETCH_S:
            return [*read, *self._fetch_many(keys[FEW:])]
        note_unread(unread_s)
        return [read[position % FEW] for position in range(len(keys))]

    def _one_by_one(self, keys: list[Any]) -> list[Any]:
        reader, pace = self._reader, _Pace(len(keys))
        read: list[tuple[Any, Any]] = []
        raised: list[tuple[Any, Exception]] = []
        for key in keys:
            try:
                read.append((key, self._alone(key)))
            except Exception as error:
                if not is_of_dataset(error):
                    raise
                raised.append((key, error))
                if len(raised) > len(keys) / 2 and not reader.has_good:
                    raise raised[0][1] from None
            pace.note()
            if reader.is_paced and pace.is_too_slow():
                note_unread(pace.rest_s())
                break
        if read:
            reader.good, reader.has_good = read[-1][0], True
        for key, raised_by in raised:  # after the others, of which each stands for one that could be read
            reader.note((key,), f"sample {key!r}", raised_by)
            read.append((reader.good, self._alone(reader.good)))
        whole = [read[position % len(read)] for position in range(len(keys))]
        _keys[:] = [key for key, _ in whole]
        return [sample for _, sample in whole]

    def _alone(self, key: Any) -> Any:
        return self._fetch_many([key])[0] if self._fetch_many else self._inner[key]


class BurstStream(Wrapped, IterableDataset[Any]):
    """An IterableDataset that ends, instead of raising, where it has delivered something; and starts over then."""

    def __init__(self, dataset: Any, notebook: Notebook, is_paced: bool, batch_size: int | None) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reader", _Reader(notebook, is_paced))
        object.__setattr__(self, "_batch_size", batch_size)

    def __reduce__(self) -> tuple[Any, ...]:
        reader = self._reader
        return loads, (dumps((type(self), self._inner, reader.notebook, reader.is_paced, self._batch_size)),)

    def __iter__(self) -> Iterator[Any]:
        paced = self._reader.is_paced and self._batch_size is not None
        samples, delivered, begun, pace = iter(self._inner), 0, None, _Pace(0)
        sample: Any = None
        _keys.clear()
        while True:
            if paced and batch_begun() != begun:
                begun, pace = batch_begun(), _Pace(self._batch_size)
            if paced and delivered and pace.is_too_slow():
                note_unread(pace.typical_s())
                yield sample
                continue
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                if not delivered or not is_of_dataset(error):
                    raise
                self._reader.note((), f"the sample after {delivered:,} of a process's stream", error)
                return
            delivered += 1
            if paced:
                pace.note()
            yield sample


class _Pace:
    """How quickly the samples of one batch come."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._begun = self._last = time.monotonic()
        self._later_s: list[float] = []
        """Of each but the first, which may open files."""
        self._read = 0

    def note(self) -> None:
        now = time.monotonic()
        if self._read:
            self._later_s.append(now - self._last)
        self._last, self._read = now, self._read + 1

    def is_too_slow(self) -> bool:
        """Whether the rest, if all of it comes as slowly, is not worth waiting for."""
        if not self._later_s or self._last - self._begun < SLOW_FETCH_S:
            return False
        return min(self._later_s) * (self._samples - self._read) > SLOW_FETCH_S

    def typical_s(self) -> float:
        return fmean(self._later_s)

    def rest_s(self) -> float:
        return self.typical_s() * (self._samples - self._read)


class BurstCollate:
    """The user's collate function, which goes without the few samples that it raises for."""

    def __init__(self, collate_fn: Callable[[Any], Any], notebook: Notebook) -> None:
        self._collate_fn = collate_fn
        self._reader = _Reader(notebook, is_paced=False)

    def __call__(self, samples: Any) -> Any:
        try:
            return self._collate_fn(samples)
        except Exception as error:
            if not isinstance(samples, list) or len(samples) < 3 or not is_of_dataset(error):
                raise
            odd = self._odd(samples)
            if odd is None:
                raise
            even = [position for position in range(len(samples)) if position not in odd]
            self._note(odd, even[0], error)
            filled = [samples[even[number % len(even)]] for number in range(len(samples))]
            return self._collate_fn(filled)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._collate_fn, self._reader.notebook)

    def _note(self, odd: list[int], even: int, error: Exception) -> None:
        for position in odd:
            keys = (_keys[even], _keys[position]) if position < len(_keys) else ()
            self._reader.note(keys, f"sample {keys[-1]!r}" if keys else "a sample of the stream", error)

    def _odd(self, samples: list[Any]) -> list[int] | None:
        """Positions of the samples without which the others can be collated; None where these are not few."""
        everything = list(range(len(samples)))
        for order in (everything, everything[::-1]):  # the very first may be the odd one out
            left, odd = list(order), list[int]()
            while self._raises([samples[position] for position in left]):
                if len(odd) >= max(1, len(samples) // ODD_SHARE):
                    break
                shortest = bisect_left(
                    range(1, len(left)), True, key=lambda count: self._raises([samples[p] for p in left[:count]])
                )
                odd.append(left.pop(shortest))
            else:
                return odd
        return None

    def _raises(self, samples: list[Any]) -> bool:
        try:
            self._collate_fn(samples)
        except Exception:
            return True
        return False


def for_bursts(data: DataSide, notebook: Notebook, *, is_paced: bool) -> DataSide:
    """The same data side for bursts.

    Args:
        data: the user's parts.
        notebook: where what raised is noted.
        is_paced: whether the fetch of a batch may be cut short.
    """
    collate_fn = data.collate_fn
    if data.batch_size is not None or data.batch_sampler is not None:
        collate_fn = BurstCollate(collate_fn or default_collate, notebook)
    dataset: Any = (
        BurstStream(data.dataset, notebook, is_paced, data.batch_size)
        if data.is_iterable
        else BurstDataset(data.dataset, notebook, is_paced)
    )
    return replace(data, dataset=dataset, collate_fn=collate_fn)


class BurstStep:
    """Trains on batches; for the few that the user's step raises for, on one that it is known to take.

    Args:
        step: the step.
        good: a batch as the loader delivers it, that the step was warmed up with.
        notebook: where what raised is noted.
    """

    def __init__(self, step: TrainingStep, good: Any, notebook: Notebook) -> None:
        self._step = step
        self._good = good
        self._notebook = notebook
        self._batches = self._raised = 0

    def __call__(self, batch: Any) -> None:
        self._batches += 1
        try:
            self._step.train(batch)
        except Exception as error:
            self._raised += 1
            if not is_of_dataset(error) or self._raised > 1 + self._batches // ODD_SHARE:
                raise
            try:
                self._step.run(self._good)
            except Exception:  # it is no fault of that batch, or has broken the device
                raise error from None
            self._notebook.note((), "the step on a batch", error)


def raises_alone(data: DataSide, raised: Raised) -> bool:
    """Whether the same is raised in this process, by reading and collating what it was raised for; a stream is believed."""
    if not raised.keys:
        return True
    fetch_many = getattr(data.dataset, "__getitems__", None)
    try:
        samples = fetch_many(list(raised.keys)) if fetch_many else [data.dataset[key] for key in raised.keys]
        if len(raised.keys) > 1:
            (data.collate_fn or default_collate)(samples)
    except Exception:
        return True
    return False
