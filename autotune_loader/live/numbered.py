"""The user's dataset and collate function behind index batches that carry their number.

feed ── (number, epoch seed, indices) ── fetch, collate ── (batch, fetch, number, told) ── loop

The number says which batch has arrived; with the epoch's seed it says which random numbers were its own. What workers are
sent is one object, so that torch pickles dataset, collate function and init function together: what is one object here is
one object there, and classes of the script are those of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, get_worker_info

from autotune_loader.live.seeds import LoopSeeds, WorkerSeeds
from autotune_loader.machine.sandbox import Channels, cut, die_with_starter
from autotune_loader.pipeline.look import GENERATORS, Held, look
from autotune_loader.pipeline.tracing import (
    TracedCollate,
    TracedDataset,
    TracedIterable,
    TracedWorkerInit,
    forget_open_batch,
)

Item = tuple[int, int, Any]
"""number of the batch in its epoch, seed of the epoch, indices (one index where the dataset makes the batches)"""
WORKER_NAMES = ("id", "num_workers")
"""Attributes of `get_worker_info()` by which samples may depend on the number of workers."""

_reads_worker = False
"""Whether the user's code has read one of them in this worker."""


class Raised:
    """An exception of the user's in place of a batch, so that its number is known and the worker goes on."""

    def __init__(self) -> None:
        worker = get_worker_info()
        number = object.__getattribute__(worker, "id")  # past `_watched`
        self._wrapped = ExceptionWrapper(where=f"in DataLoader worker process {number}")

    def __str__(self) -> str:
        return str(self._wrapped.exc_msg).strip().splitlines()[-1]

    def reraise(self) -> None:
        """Raise it as torch would."""
        self._wrapped.reraise()


class RaisedHere(Raised):
    """The same in the training process, where it is raised as it is."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __str__(self) -> str:
        return repr(self._error)

    def reraise(self) -> None:
        try:
            raise self._error
        finally:
            del self._error  # its frames hold this object


class _Sent:
    """The user's parts, in one piece.

    Args:
        dataset: of the user.
        collate_fn: of the user.
        init_fn: of the user: `worker_init_fn`.
        batched: whether samples are collated; False where the dataset makes the batches.
        watches: whether workers are watched for what they are at.

    Attributes:
        foreign: pipes and sockets of the training process that workers have no use for.
        ends_with_parent: whether workers end at once when the training process is gone; torch's look for that every 5 s.
    """

    foreign: Channels = MappingProxyType({})
    ends_with_parent = False

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        init_fn: Callable[[int], None] | None,
        *,
        batched: bool,
        watches: bool,
    ) -> None:
        self._dataset, self._collate_fn, self._init_fn = dataset, collate_fn, init_fn
        self._batched, self._watches = batched, watches

    def begin(self, worker: int) -> None:
        """In a new worker, whose `get_worker_info()` tells of the user's own dataset; then the user's `worker_init_fn`."""
        if self.ends_with_parent:
            die_with_starter()
        cut(self.foreign)
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", self._dataset)
        object.__setattr__(info, "__class__", _watched(type(info)))
        TracedWorkerInit(self._init_fn, self._watches)(worker)


class NumberedBatches(_Sent):
    """A map-style dataset's batches, by number. As the dataset of a DataLoader it is asked for one item at a time."""

    seeds: WorkerSeeds | LoopSeeds | None = None
    """None leaves the random numbers to torch."""
    is_on_trust = False
    """Whether nobody asked for workers: they tell of what only the training process may do."""
    _held: Held | None = None
    _traced: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
    _failure: Raised | None = None

    def __getitems__(self, item: Item) -> tuple[Any, Any, int, str | None]:
        number, epoch_seed, indices = item
        fetch, collate = self._traced or self._begun()
        seeds = self.seeds
        if seeds is not None:
            seeds.begin(epoch_seed, number)
        try:
            if self._failure is not None:
                return self._failure, None, number, "reads"
            return *collate(fetch(indices)), number, self._told
        except Exception as error:
            forget_open_batch()
            return Raised() if get_worker_info() else RaisedHere(error), None, number, self._told
        finally:
            if seeds is not None:
                seeds.end()

    @property
    def _told(self) -> str | None:
        """What of `WHY` this worker has done."""
        if self._held is not None and not self._held.is_unchanged():
            return "changes" if self.is_on_trust else "draws"
        if self._held is None and get_worker_info() is not None:
            self._held = self._noted(GENERATORS)  # workers that were asked for may change all else
        return "reads" if _reads_worker else None

    def _begun(self) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        traced = TracedDataset(self._dataset)  # here, as what it is in a worker cannot be sent
        fetch = traced.__getitems__ if self._batched else traced.__getitem__
        self._traced = fetch, TracedCollate(self._collate_fn, self._batched)
        return self._traced

    def _noted(self, kinds: Any) -> Held:
        seen = look({"dataset": self._dataset, "collate_fn": self._collate_fn})
        seen.values = [each for each in seen.values if isinstance(each, kinds)]
        return Held(seen)

    def begin(self, worker: int) -> None:
        try:
            super().begin(worker)
            if self.is_on_trust:
                self._held = self._noted(object)
        except Exception:
            self._failure = Raised()  # as torch, which raises it in place of a batch


class BatchesInLoop(IterableDataset[Any]):
    """Batches that the training process makes itself; one that raises is followed by the next.

    It takes the place of torch's iterator, which without workers would do the same and tell the profiler, for 7 us a batch.
    """

    def __init__(self, batches: NumberedBatches, feed: Iterator[Item], look: Callable[..., Any]) -> None:
        self._make, self._feed, self.look = batches.__getitems__, feed, look

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.look(self._make, next(self._feed))


class StreamBatches(_Sent, IterableDataset[Any]):
    """An IterableDataset, whose batches have no number."""

    _traced: TracedCollate | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(TracedIterable(self._dataset))

    def collate(self, samples: Any) -> Any:
        """The user's, and the batch's history."""
        if self._traced is None:
            self._traced = TracedCollate(self._collate_fn, self._batched)
        return *self._traced(samples), None, None


def unchanged(batch: Any) -> Any:
    """Collates what is a batch already."""
    return batch


def _watched(kind: Any) -> type[Any]:
    """A class of `get_worker_info()` that notes whether the user's code asks who the worker is."""

    def getattribute(info: Any, name: str) -> Any:
        if name in WORKER_NAMES:
            global _reads_worker
            _reads_worker = True
        return kind.__getattribute__(info, name)

    names = {"__slots__": (), "__getattribute__": getattribute, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)
