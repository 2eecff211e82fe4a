"""Loaders that a script makes anew for each epoch are one loader to the tuner: the next goes on with what one has learnt."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

MOST_KNOWN = 16
"""Loaders of a process that are remembered, the latest."""


@dataclass(frozen=True, slots=True)
class _Left:
    users: tuple[weakref.ref[Any], ...]
    learnt: Any


_left: dict[Hashable, _Left] = {}


def keep(key: Hashable, learnt: Any, *users: Any) -> None:
    """From now on this is what was learnt; it is to be had once all users are gone."""
    _left.pop(key, None)
    _left[key] = _Left(tuple(weakref.ref(each) for each in users), learnt)
    for oldest in list(_left)[:-MOST_KNOWN]:
        del _left[oldest]


def forget(key: Hashable) -> None:
    """Nobody is to go on with this."""
    _left.pop(key, None)


def left_by_another(key: Hashable) -> Any:
    """What a loader has learnt that is no longer iterated; None where there is none."""
    known = _left.get(key)
    return None if known is None or any(each() is not None for each in known.users) else _left.pop(key).learnt
