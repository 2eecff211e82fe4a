"""An iterator of torch's, or of AutoLoader's, that tells how long its loop waits and, where it can, how long each batch took.

It is an object of a class that is made from its own, with the same name; workers, order, end, warnings and tracebacks are what
they would be: `__next__`, `_reset` and two attributes are looked up through descriptors, and what lies between asking and
having a batch is built of C iterators, so that no frame of ours is on the stack meanwhile:

    next(iterator) ──► ask ──► torch's own __next__ ──► receive      StopIteration ──► end
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from autotune_loader.scripts.batch_log import Loop
from autotune_loader.scripts.carrying import Carrying, CarryingQueue

LOOP = "_autotune_loader_loop"
"""Attribute of an iterator that is watched."""
FLAG, QUEUE = "_auto_collation", "_worker_result_queue"

_classes: dict[Any, Any] = {}


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
        return self._plain if iterator is None else self._looked(vars(iterator)[LOOP], self._plain.__get__(iterator))


def _next(loop: Loop, plain: Any) -> Any:
    # Made anew for each batch: a kept one would be a circle, and workers end when the last reference goes.
    return map(loop.receiving, itertools.chain(loop.asking(), iter(plain, NOTHING), loop.ending())).__next__


def _reset(loop: Loop, plain: Any) -> Any:
    """Torch calls it at the end of making an iterator, and where persistent workers begin another epoch."""
    loop.reset()
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
        loop = vars(iterator)[LOOP]
        if self._name == FLAG:
            loop.flag = value = Carrying(value)
        elif loop.flag is not None:
            value = CarryingQueue(value, loop.flag)
        vars(iterator)[self._name] = value


def watched(kind: Any, *, carries: bool) -> Any:
    """The class of watched iterators of a class; `carries`: it is one of torch's two, whose batches can take times along."""
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        hooks: dict[str, Any] = {"__next__": _Looked(kind.__next__, _next)}
        if hasattr(kind, "_reset"):
            hooks["_reset"] = _Looked(kind._reset, _reset)
        if carries:
            hooks |= {FLAG: _Attribute(FLAG), QUEUE: _Attribute(QUEUE)}
        _classes[kind] = type(kind.__name__, (kind,), names | hooks)
    return _classes[kind]
