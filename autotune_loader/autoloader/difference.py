"""Where two batches differ: types, dtypes, shapes and bytes; floats may differ by what another order of adding them up does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

ULPS, ULPS_OF_HALVES = 64, 4
"""Units in the last place by which floats may differ, relative to the largest: threads add up in another order."""
MOST_DEPTH = 32


def difference(own: Any, other: Any, path: str = "batch", depth: int = MOST_DEPTH) -> str | None:
    """The path of the first value by which two batches differ; None where they are the same."""
    if type(own) is not type(other) or not depth:
        return path
    if isinstance(own, np.ndarray) and own.dtype.hasobject:
        return difference(own.tolist(), other.tolist(), path, depth - 1)
    if isinstance(own, torch.Tensor):
        return None if _are_same_tensors(own, other) else path
    if isinstance(own, (np.ndarray, np.generic, float, complex)):
        return None if _are_same_arrays(np.asarray(own), np.asarray(other)) else path
    if own is None or isinstance(own, (bool, int, str, bytes, bytearray, type, set, frozenset)):
        return None if own == other else path
    mine, others = _inside(own), _inside(other)
    if list(mine) != list(others):
        return path
    for name, value in mine.items():
        if value is not others[name] and (found := difference(value, others[name], path + name, depth - 1)) is not None:
            return found
    return None


def _inside(value: Any) -> dict[str, Any]:
    """What a container or an object consists of; of the latter, as pickle sees it."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{number}]": each for number, each in enumerate(value)}
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global's name
        return {"": reduced}
    made_with, state = (*reduced, None)[1:3]
    named = {f".{name}": each for name, each in state.items()} if isinstance(state, dict) else {"": state}
    return {" as it was made": made_with, **named}


def _are_same_arrays(own: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    if own.tobytes() == other.tobytes() or own.dtype.kind not in "fc":
        return own.tobytes() == other.tobytes()
    return _are_same_tensors(torch.as_tensor(own.copy()), torch.as_tensor(other.copy()))


def _are_same_tensors(own: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        kinds = [(each.dtype, each.layout, each.device.type, each.requires_grad) for each in (own, other)]
        if kinds[0] != kinds[1]:
            return False
        if own.is_nested:
            return own.size(0) == other.size(0) and all(map(_are_same_tensors, own.unbind(), other.unbind()))
        if own.shape != other.shape:
            return False
        if own.layout is not torch.strided:
            own, other = own.to_dense(), other.to_dense()
        if torch.equal(own, other):
            return True
        if not (own.is_floating_point() or own.is_complex()):
            return False
        finite = own[torch.isfinite(own)].abs()
        ulps = ULPS if own.dtype in (torch.float32, torch.float64) else ULPS_OF_HALVES
        most = ulps * torch.finfo(own.dtype).eps * (float(finite.max()) if finite.numel() else 0.0)
        return torch.allclose(own, other, rtol=0.0, atol=most, equal_nan=True)
