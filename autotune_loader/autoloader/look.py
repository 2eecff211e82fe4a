"""Whether workers may make what the loop makes: equal batches, compared leaf by leaf, and nothing noted on the way."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch

from autotune_loader.pipeline.workload import is_users

LRU_CACHE: Any = type(functools.lru_cache(len))
DEEPEST = 32
"""How deep a batch is compared."""
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


def is_same(one: Any, other: Any, depth: int = DEEPEST) -> bool:
    """Whether two batches are equal in types and values. What neither compares nor pickles is not."""
    if type(one) is not type(other):
        return False
    if one is other or not depth:
        return True
    if isinstance(one, torch.Tensor):
        return is_same(vars(one), vars(other), depth - 1) and _are_tensors_same(one, other)
    if isinstance(one, np.ndarray) and one.dtype.kind in "biufc":
        return one.dtype == other.dtype and _are_tensors_same(
            torch.from_numpy(one.copy()), torch.from_numpy(other.copy())
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and is_same(one.tolist(), other.tolist(), depth - 1)
    if isinstance(one, (float, complex, np.number)):
        return bool(np.isclose(one, other, rtol=NEAR, atol=0.0, equal_nan=True))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(is_same(one[key], other[key], depth - 1) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(is_same(a, b, depth - 1) for a, b in zip(one, other, strict=True))
    if one is None or isinstance(one, (bool, int, str, bytes, bytearray, type, set, frozenset)):
        return bool(one == other)
    known, its = one.__reduce_ex__(4), other.__reduce_ex__(4)
    if isinstance(known, str):
        return bool(known == its)
    return is_same(list(known[1:3]), list(its[1:3]), depth - 1)


def _are_tensors_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if one.is_nested or other.is_nested:
            parts = [each.unbind() if each.is_nested else () for each in (one, other)]
            return one.layout == other.layout and len(parts[0]) == len(parts[1]) and all(map(_are_tensors_same, *parts))
        about = [(each.dtype, each.shape, each.layout, each.device.type, each.requires_grad) for each in (one, other)]
        if about[0] != about[1]:
            return False
        one, other = (
            each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (one, other)
        )
        if not one.numel():
            return True
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        if torch.equal(one, other):  # which is quick; NaN equals nothing
            return True
        largest = torch.nan_to_num(one.abs(), 0.0, 0.0, 0.0).max().item()
        return torch.allclose(one, other, rtol=NEAR, atol=NEAR * largest, equal_nan=True)
