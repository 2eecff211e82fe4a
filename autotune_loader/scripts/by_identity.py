"""Facts about objects of the script, which live as long as the object does and leave no trace in it."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """A mapping of objects that need not be hashable: a loader may be a dataclass."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, owner: Any) -> V | None:
        """What is known of an object; None where nothing is."""
        known = self._known.get(id(owner))
        return known[1] if known is not None and known[0]() is owner else None

    def __setitem__(self, owner: Any, value: V) -> None:
        number = id(owner)
        self._known[number] = weakref.ref(owner, lambda gone: self._drop(number, gone)), value

    def _drop(self, number: int, gone: weakref.ref[Any]) -> None:
        if number in self._known and self._known[number][0] is gone:  # another object may have the number now
            del self._known[number]
