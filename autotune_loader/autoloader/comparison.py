"""Whether workers' batches may be used: their first ones, and then ever fewer, are fetched by the loop as well.

    a worker's batch comes ── the loop fetches it, too, under the same seed ── the same? ── the loop's own is delivered

Batches 1 to 8 of workers, then 16, 32, 64 ... Before any worker starts, four fetches of the loop are watched: what fetching
changes, and what it writes, only the process that trains may do.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

FIRST = 8
"""Batches of workers that are compared at first."""
WATCHED = 4
"""Fetches of the loop that are watched before workers may start."""
MOST_DEPTH = 32
ULPS = 64
"""Units in the last place by which floats may differ, relative to the largest: threads add up in another order."""
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
"""Audit events that change files; their first argument is the file."""
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def is_due(number: int) -> bool:
    """Whether the batch of workers with this number, from 1, is compared."""
    return number <= FIRST or number & (number - 1) == 0


def difference(own: Any, other: Any, path: str = "batch", depth: int = MOST_DEPTH) -> str | None:
    """The path of the first value by which two batches differ; None where they are the same."""
    if type(own) is not type(other) or not depth:
        return path
    if isinstance(own, torch.Tensor):
        return None if _are_same_tensors(own, other) else path
    if isinstance(own, np.ndarray) and own.dtype.hasobject:
        return difference(own.tolist(), other.tolist(), path, depth - 1)
    if isinstance(own, (np.ndarray, np.generic, float, complex)):
        return None if _are_same_arrays(np.asarray(own), np.asarray(other)) else path
    if own is None or isinstance(own, (bool, int, str, bytes, bytearray, type, set, frozenset)):
        return None if own == other else path
    if isinstance(own, Mapping):
        if list(own) != list(other):
            return path
        pairs = [(f"{path}[{key!r}]", own[key], other[key]) for key in own]
    elif isinstance(own, (list, tuple)):
        if len(own) != len(other):
            return path
        pairs = [(f"{path}[{number}]", *both) for number, both in enumerate(zip(own, other, strict=True))]
    else:
        mine, others = _inside(own), _inside(other)
        if mine.keys() != others.keys():
            return path
        pairs = [(path + name, mine[name], others[name]) for name in mine]
    for where, a, b in pairs:
        if a is not b and (found := difference(a, b, where, depth - 1)) is not None:
            return found
    return None


def _inside(value: Any) -> dict[str, Any]:
    """What an object consists of, as pickle sees it."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global's name
        return {"": reduced}
    made_with, state = (*reduced, None)[1:3]
    if isinstance(state, dict):
        return {" as it was made": made_with, **{f".{name}": inner for name, inner in state.items()}}
    return {" as it was made": made_with, "": state}


def _are_same_tensors(own: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        a, b = own, other
        if (a.dtype, a.layout, a.device.type, a.requires_grad) != (b.dtype, b.layout, b.device.type, b.requires_grad):
            return False
        if a.is_nested:
            return a.size(0) == b.size(0) and all(map(_are_same_tensors, a.unbind(), b.unbind()))
        if a.shape != b.shape:
            return False
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if torch.equal(a, b):
            return True
        if not (a.is_floating_point() or a.is_complex()):
            return False
        unit = (
            ULPS * torch.finfo(a.dtype).eps
            if a.dtype in (torch.float32, torch.float64)
            else 4 * torch.finfo(a.dtype).eps
        )
        finite = a[torch.isfinite(a)].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        return torch.allclose(a, b, rtol=0.0, atol=unit * largest, equal_nan=True)


def _are_same_arrays(own: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if own.dtype != other.dtype or own.shape != other.shape:
        return False
    if own.dtype.kind not in "fc":
        return own.tobytes() == other.tobytes()
    finite = np.abs(own[np.isfinite(own)])
    largest = float(finite.max()) if finite.size else 0.0
    return np.allclose(own, other, rtol=0.0, atol=ULPS * float(np.finfo(own.dtype).eps) * largest, equal_nan=True)


class _Writing(threading.local):
    is_watched = False
    found: str | None = None


_writing = _Writing()
_hooks: list[Any] = []


class watching_files:  # noqa: N801 - used as a statement
    """Within it, what this thread writes or removes is noted; `found` is the first such file."""

    found: str | None = None

    def __enter__(self) -> watching_files:
        if not _hooks:  # they cannot be removed
            _hooks.append(_audit)
            sys.addaudithook(_audit)
        _writing.is_watched, _writing.found = True, None
        return self

    def __exit__(self, *_: object) -> None:
        _writing.is_watched, self.found = False, _writing.found


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _writing.is_watched or _writing.found is not None:
        return
    if event == "open":
        path, mode, flags = (*arguments, None, None)[:3]
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITE_FLAGS)
        if not writes or isinstance(path, int) or "__pycache__" in str(path) or str(path) == os.devnull:
            return
    elif event not in WRITES:
        return
    _writing.found = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else str(arguments[0])
