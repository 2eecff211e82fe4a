"""An iterator of torch's, or of AutoLoader's, that tells how long its loop waits and, where it can, how long each batch took.

It is an object of a class that is made from its own, with the same name; workers, order, end, warnings and tracebacks are what
they would be: `__next__`, `_reset` and two attributes are looked up through descriptors, and what lies between asking and
having a batch is built of C iterators, so that no frame of ours is on the stack meanwhile:

    next(iterator) ──► ask ──► torch's own __next__ ──► receive      StopIteration ──► end
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from autotune_loader.scripts.batch_log import BatchLog, Loop
from autotune_loader.scripts.carrying import Carried, Carrying, CarryingQueue

RECORD = "_autotune_loader_record"
"""Attribute of an iterator that is watched."""
FLAG, QUEUE = "_auto_collation", "_worker_result_queue"

log = logging.getLogger(__name__)
_classes: dict[Any, Any] = {}


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
        self.loop, self.flag = Loop(batch_log, loader), None
        self._between, self._keep = between, keep
        self._made: float | None = time.monotonic()

    flag: Carrying | None

    def reset(self, begun: float | None = None) -> None:
        """Torch is done with starting workers, which it began when the record was made, or begins again with those it has."""
        made, self._made = self._made, None
        if made is None:
            self.loop.again()
        else:
            self.loop.blocked(time.monotonic() - (begun or made))

    def asking(self) -> Iterator[Any]:
        """Begun where the loop asks for a batch; gives none."""
        self._made, now = None, time.monotonic()
        self.loop.ask(now)
        if self._between is not None:
            self._between(now)
        return
        yield

    def receive(self, batch: Any) -> Any:
        """The batch, as the loop gets it."""
        fetch = None
        try:
            if type(batch) is Carried:
                batch, fetch = batch
            elif self.flag is not None:
                fetch = self.flag.fetched()
            self.loop.receive(time.monotonic(), batch, fetch)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a batch was not counted", exc_info=True)
        return batch

    def ending(self) -> Iterator[Any]:
        """Begun where there are no more batches; gives none."""
        self.loop.end(time.monotonic())
        return
        yield


class _Nothing:
    """What no batch is equal to."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


NOTHING = _Nothing()


class _Looked:
    """A method that is told of as it is looked up: what is called is torch's own."""

    def __init__(self, plain: Any, looked: Callable[[Any, Any], Any]) -> None:
        self._plain, self._looked = plain, looked

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        return self._plain if iterator is None else self._looked(vars(iterator)[RECORD], self._plain.__get__(iterator))


def _next(record: Record, plain: Any) -> Any:
    # Made anew for each batch: a kept one would be a circle, and workers end when the last reference goes.
    return map(record.receive, itertools.chain(record.asking(), iter(plain, NOTHING), record.ending())).__next__


def _reset(record: Record, plain: Any) -> Any:
    """Torch calls it at the end of making an iterator, and where persistent workers begin another epoch."""
    record.reset()
    return plain


class _Attribute:
    """An attribute that torch sets, of which workers get a version that carries times."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if self._name not in vars(iterator):
            raise AttributeError(f"{type(iterator).__name__!r} object has no attribute {self._name!r}")
        return vars(iterator)[self._name]

    def __set__(self, iterator: Any, value: Any) -> None:
        record = vars(iterator)[RECORD]
        if self._name == FLAG:
            record.flag = value = Carrying(value)
        elif record.flag is not None:
            value = CarryingQueue(value, record.flag)
        vars(iterator)[self._name] = value


def watched(kind: Any, *, carries: bool) -> Any:
    """The class of watched iterators of this class.

    Args:
        kind: a class of iterators.
        carries: whether it is one of torch's two, whose batches can take their times along.
    """
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        hooks: dict[str, Any] = {"__next__": _Looked(kind.__next__, _next)}
        if hasattr(kind, "_reset"):
            hooks["_reset"] = _Looked(kind._reset, _reset)
        if carries:
            hooks |= {FLAG: _Attribute(FLAG), QUEUE: _Attribute(QUEUE)}
        _classes[kind] = type(kind.__name__, (kind,), names | hooks)
    return _classes[kind]
