"""Whether workers may make what the loop makes: equal batches, compared leaf by leaf, and nothing noted on the way."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from autotune_loader.pipeline.workload import is_users

LRU_CACHE: Any = type(functools.lru_cache(len))
NEAR = 1e-5
"""Floats may differ by this, relative to the largest: other threads add up in another order."""


def notes(objects: Iterable[Any]) -> dict[str, int]:
    """Counters, sizes of containers and of caches of the user's objects: what changes there, workers would note elsewhere."""
    found = dict[str, int]()
    for each in objects:
        kind, values = type(each), getattr(each, "__dict__", None)
        if not isinstance(values, dict) or not is_users(kind.__module__):
            continue
        for name, value in values.items():
            if isinstance(value, (list, dict, set, deque)):
                found[f"{kind.__name__}.{name}"] = len(value)
            elif type(value) is int:
                found[f"{kind.__name__}.{name}"] = value
        found |= {f"the cache of {name}": cache.cache_info().currsize for name, cache in _caches(kind)}
    return found


def _caches(kind: type) -> Iterator[tuple[str, Any]]:
    """What `functools.lru_cache` has made of methods of a class, and of functions that these call by name."""
    for name, value in vars(kind).items():
        named = {name: value}
        if isinstance(value, FunctionType):
            named = {each: value.__globals__.get(each) for each in value.__code__.co_names}
        yield from ((each, cache) for each, cache in named.items() if isinstance(cache, LRU_CACHE))
