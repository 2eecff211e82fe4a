"""Whether two batches are equal, whatever they are made of: in types and in values, leaf by leaf."""

from __future__ import annotations

import cmath
import copyreg
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

FLOATS = float, complex, np.inexact
ATOMS = bool, int, str, bytes, bytearray, type, set, frozenset, CodeType
"""What `==` compares as a whole."""
ARRAYS, WITH_NOTHING = "biufcmMSU", "fcmM"
"""Kinds of arrays that numpy compares, and those that may hold NaN or NaT."""


def is_equal(one: Any, other: Any, near: float = 0.0) -> bool:
    """Whether two batches are equal; NaN equals NaN. What is no tensor, array or container is compared by what pickles of it.

    Args:
        one: A batch.
        other: Another one.
        near: Floats may differ by this, relative to them, and in a tensor to the largest; 0 compares them bit by bit.

    Raises:
        Exception: As an object raises that can be neither compared nor pickled.
    """
    pairs, seen = [(one, other)], dict[tuple[int, int], Any]()
    while pairs:
        own, theirs = pairs.pop()
        if own is theirs or (id(own), id(theirs)) in seen:  # such as objects that hold one another
            continue
        if type(own) is not type(theirs) or (is_whole := _is_equal_leaf(own, theirs, near)) is False:
            return False
        if is_whole is None:
            parts = _parts(own), _parts(theirs)
            if len(parts[0]) != len(parts[1]):
                return False
            seen[id(own), id(theirs)] = own, theirs  # kept, so that nothing else has their ids
            pairs += zip(*parts, strict=True)
    return True


def _is_equal_leaf(own: Any, theirs: Any, near: float) -> bool | None:
    """None for what is equal if its parts are."""
    if own is None or isinstance(own, ATOMS):
        return bool(own == theirs)
    if isinstance(own, FLOATS):
        return bool(own == theirs or (own != own and theirs != theirs) or cmath.isclose(own, theirs, rel_tol=near))
    if isinstance(own, torch.Tensor):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return None if _are_tensors_equal(own, theirs, near) else False
    if type(own) is np.ndarray and own.dtype.kind in ARRAYS:
        return own.dtype == theirs.dtype and own.shape == theirs.shape and _are_arrays_equal(own, theirs, near)
    return None


def _are_arrays_equal(own: Any, theirs: Any, near: float) -> bool:
    kind = own.dtype.kind
    if np.array_equal(own, theirs, equal_nan=kind in WITH_NOTHING):
        return True
    if not near or kind not in "fc":
        return False
    largest = np.nan_to_num(np.abs(own), nan=0.0, posinf=0.0, neginf=0.0).max()
    return np.allclose(own, theirs, rtol=near, atol=near * largest, equal_nan=True)


def _parts(value: Any) -> list[Any]:
    """What a value is made of; of a tensor, what it has beside its elements."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_nested else [vars(value)]
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    if type(value) is np.ndarray:
        return [value.dtype.str, value.shape, value.tolist()]
    if isinstance(value, FunctionType):
        return [value.__code__, value.__defaults__, value.__kwdefaults__]
    reduce = copyreg.dispatch_table.get(type(value))
    known: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    return [known] if isinstance(known, str) else [[*each] if isinstance(each, Iterator) else each for each in known]


def _are_tensors_equal(own: torch.Tensor, theirs: torch.Tensor, near: float) -> bool:
    if own.is_nested != theirs.is_nested:
        return False
    if own.is_nested:
        parts = own.unbind(), theirs.unbind()
        is_alike = own.layout == theirs.layout and len(parts[0]) == len(parts[1])
        return is_alike and all(_are_tensors_equal(*each, near) for each in zip(*parts, strict=True))
    kinds = [(each.dtype, each.shape, each.layout, each.device.type, each.requires_grad) for each in (own, theirs)]
    if kinds[0] != kinds[1]:
        return False
    own, theirs = own.detach(), theirs.detach()
    if own.layout is not torch.strided:
        own, theirs = own.to_sparse(), theirs.to_sparse()
        is_alike = _are_tensors_equal(own._indices(), theirs._indices(), 0.0)
        return is_alike and _are_tensors_equal(own._values(), theirs._values(), near)
    if own.is_quantized:  # whose bytes have no view
        return torch.equal(own, theirs)
    if torch.equal(_bytes(own), _bytes(theirs)):
        return True
    if not near or not (own.is_floating_point() or own.is_complex()):
        return False
    largest = torch.nan_to_num(own.abs(), 0.0, 0.0, 0.0).max().item()
    return torch.allclose(own, theirs, rtol=near, atol=near * largest, equal_nan=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
