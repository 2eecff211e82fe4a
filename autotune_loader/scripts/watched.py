"""An iterator of torch's, or of AutoLoader's, that tells how long its loop waits and, where it can, how long each batch took.

It is an object of a class that is made from its own, with the same name; workers, order, end, warnings and tracebacks are what
they would be. What is told apart from ordinary code: `__next__`, `_reset` and two attributes are looked up through descriptors,
and what lies between asking and having a batch is built of C iterators, so that no frame of ours is on the stack meanwhile:

    next(iterator) ──► ask ──► torch's own __next__ ──► receive      StopIteration ──► end
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.workload import length_of
from autotune_loader.scripts.batch_log import BatchLog, Epoch
from autotune_loader.scripts.carrying import Carried, Carrying, CarryingQueue

RECORD = "_autotune_loader_record"
"""Attribute of an iterator that is watched."""
FLAG, QUEUE = "_auto_collation", "_worker_result_queue"

log = logging.getLogger(__name__)


class Record:
    """What one iterator tells.

    Args:
        batch_log: of the loader.
        loader: whose batches they are; it is not kept.
        between: called with the time before a batch is asked for.
        keep: kept alive as long as batches may be wanted.
    """

    def __init__(
        self, batch_log: BatchLog, loader: Any, between: Callable[[float], None] | None = None, keep: Any = None
    ) -> None:
        self.batch_log = batch_log
        self._between, self._keep = between, keep
        self._size, self._whole = _counted(loader)
        self._left = self._whole or 0
        self._made: float | None = time.monotonic()
        self._asked = 0.0
        self._epoch = Epoch(batch_log)
        self.flag: Carrying | None = None

    def reset(self, begun: float | None = None) -> None:
        """Torch is done with starting workers, which it began when the record was made, or begins again with those it has."""
        if self._made is not None:
            self._epoch.blocked(time.monotonic() - (begun or self._made))
            self._made = None
        elif self._epoch.batches or self._epoch.is_over:
            self._epoch.leave()
            self._epoch, self._left = Epoch(self.batch_log), self._whole or 0

    def asking(self) -> Generator[Any, None, None]:
        """Begun where the loop asks for a batch; gives none."""
        self._made = None
        if self._epoch.is_over:  # asked once more, or begun again without a word
            self._epoch, self._left = Epoch(self.batch_log), self._whole or 0
        self._asked = now = time.monotonic()
        self._epoch.ask(now)
        if self._between is not None:
            self._between(now)
        yield from ()

    def receive(self, batch: Any) -> Any:
        fetch = None
        try:
            if type(batch) is Carried:
                batch, fetch = batch
            elif self.flag is not None:
                fetch = self.flag.fetched()
            if not self._epoch.batches:
                self.batch_log.measure(batch)
            self._epoch.receive(self._asked, time.monotonic(), self._samples(batch), fetch)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a batch was not counted", exc_info=True)
        return batch

    def ending(self) -> Generator[Any, None, None]:
        """Begun where there are no more batches; gives none."""
        self._epoch.end(self._asked, time.monotonic())
        yield from ()

    def _samples(self, batch: Any) -> int:
        if self._size is None or not self._left:
            return samples_in(batch) or self._size or 1
        size = min(self._size, self._left)
        self._left -= size
        return size

    def __del__(self) -> None:
        self._epoch.leave()


def _counted(loader: Any) -> tuple[int | None, int | None]:
    """Samples of a batch and of an epoch, where torch itself counts them out."""
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if not isinstance(size, int):
        return None, None
    is_stream = getattr(loader, "_dataset_kind", 1) == 1
    return size, None if is_stream else length_of(sampler)


class _Nothing:
    """What no batch is equal to."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


NOTHING = _Nothing()


class _Next:
    """`__next__`: torch's own between asking and receiving."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self._plain
        record, plain = vars(iterator)[RECORD], self._plain.__get__(iterator)
        # Made anew for each batch: a kept one would be a circle, and workers end when the last reference goes.
        batches = itertools.chain(record.asking(), iter(plain, NOTHING), record.ending())
        return map(record.receive, batches).__next__


class _Reset:
    """`_reset`: called by torch at the end of making an iterator, and when persistent workers begin another epoch."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self._plain
        vars(iterator)[RECORD].reset()
        return self._plain.__get__(iterator)


class _Attribute:
    """An attribute that torch sets, of which workers get a version that carries times."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self
        try:
            return vars(iterator)[self._name]
        except KeyError:
            raise AttributeError(f"{type(iterator).__name__!r} object has no attribute {self._name!r}") from None

    def __set__(self, iterator: Any, value: Any) -> None:
        record = vars(iterator)[RECORD]
        if self._name == FLAG:
            record.flag = value = Carrying(value)
        elif record.flag is not None:
            value = CarryingQueue(value, record.flag)
        vars(iterator)[self._name] = value


_classes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def watched(kind: Any, *, carries: bool) -> Any:
    """The class of watched iterators of this class.

    Args:
        kind: a class of iterators.
        carries: whether it is one of torch's two, whose batches can take their times along.
    """
    if kind in _classes:
        return _classes[kind]
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    hooks: dict[str, Any] = {"__next__": _Next(kind.__next__)}
    if hasattr(kind, "_reset"):
        hooks["_reset"] = _Reset(kind._reset)
    if carries:
        hooks |= {FLAG: _Attribute(FLAG), QUEUE: _Attribute(QUEUE)}
    return _classes.setdefault(kind, type(kind.__name__, (kind,), names | hooks))
