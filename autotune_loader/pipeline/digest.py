"""Whether two batches are the same, without having both in one process: a short record of each value, by its path.

A leaf is the same where its bytes are. A floating-point leaf may also be the same up to rounding: operators that run on
several threads add up in another order than on one. NaN equals NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from autotune_loader.pipeline.look import slots_of

MOST_LEAVES = 20_000
"""A batch of more values (one that refers to its whole dataset, say) is not worth comparing."""
MOST_DEPTH = 32
"""Deeper nesting is a circle, most often."""
MOST_BYTES, BLOCK = 1 << 22, 1 << 14
"""A leaf of more bytes is read in blocks, evenly spaced: 4 MiB take some 4 ms."""
PROBES = 256
"""Elements of a floating-point leaf that are kept, evenly spaced."""
ULPS, SHORT_ULPS = 64, 4
"""Units in the last place that rounding may differ by, relative to a leaf's largest value: a sum of millions in another order.
Types of less than four bytes are rounded once, from float32."""
DESCRIBING = ("mode", "size", "format", "typecode")
"""What images and arrays say beside their bytes."""


class Leaf(NamedTuple):
    """One value of a batch."""

    path: str
    """As `[0]['image'].mask`."""
    kind: str
    """Type; of an array also data type, shape and whether it requires a gradient."""
    exact: int | str
    """Checksum of its bytes; what is short is kept as it is."""
    rounded: tuple[float, list[float]] | None = None
    """Of a floating-point array: how much may be rounding, and some values and sums; None for other values."""


class TooManyLeavesError(ValueError):
    """A batch is too large or too deep to be compared."""


def digest(batch: Any) -> list[Leaf]:
    """Records of all values of a nested batch, in order: of mappings, sequences, sets, and objects with attributes.

    Raises:
        TooManyLeavesError: more than 20,000 values, or nested in a circle.
        TypeError: it holds a nested, quantized or block-sparse tensor.
    """
    leaves: list[Leaf] = []
    for leaf in _leaves("", batch, MOST_DEPTH):
        leaves.append(leaf)
        if len(leaves) > MOST_LEAVES:
            raise TooManyLeavesError(f"a batch of more than {MOST_LEAVES} values")
    return leaves


def difference(mine: list[Leaf], other: list[Leaf]) -> str | None:
    """The path of the first value by which two batches differ, and how; None where they are the same."""
    for a, b in zip(mine, other, strict=False):
        if a.path != b.path:
            return f"{_named(a.path)} (the other has {_named(b.path)})"
        if a.kind != b.kind:
            return f"{_named(a.path)} ({a.kind}, the other {b.kind})"
        if a.exact != b.exact and not _differ_by_rounding(a, b):
            return _named(a.path)
    if len(mine) != len(other):
        longer = max(mine, other, key=len)
        return f"{_named(longer[min(len(mine), len(other))].path)} (only one has it)"
    return None


def _named(path: str) -> str:
    return f"`batch{path}`"


def _differ_by_rounding(a: Leaf, b: Leaf) -> bool:
    if a.rounded is None or b.rounded is None or len(a.rounded[1]) != len(b.rounded[1]):
        return False
    tolerance = max(a.rounded[0], b.rounded[0])
    return np.allclose(a.rounded[1], b.rounded[1], rtol=0.0, atol=tolerance, equal_nan=True)


def _leaves(path: str, value: Any, depth: int) -> Iterator[Leaf]:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth <= 0:
        raise TooManyLeavesError(f"{_named(path)} is nested too deeply")
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(path, kind, value, depth)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from _of_array(path, kind, np.asarray(value), depth)
    elif isinstance(value, float):
        yield Leaf(path, kind, repr(value), _rounded(np.array([value])))
    elif value is None or isinstance(value, (bool, int, complex, type)):
        yield Leaf(path, kind, repr(value))
    elif isinstance(value, (str, bytes, bytearray)):
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value)
        exact = repr(value) if len(value) <= 64 else _checksum(np.frombuffer(data, dtype=np.uint8))
        yield Leaf(path, f"{kind}[{len(value)}]", exact)
    else:
        parts = _parts(value)
        yield Leaf(path, kind, len(parts) if parts else _in_words(value))
        for name, part in parts:
            yield from _leaves(path + name, part, depth - 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a container or an object holds, by name: where nothing can be seen, what pickle would keep of it."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("{}", part) for part in sorted(value, key=repr)]
    if callable(getattr(value, "tobytes", None)):  # PIL, memoryview, array
        told = [(f".{name}", getattr(value, name)) for name in DESCRIBING if hasattr(value, name)]
        return [(".tobytes()", value.tobytes()), *told]
    found = {**slots_of(value), **getattr(value, "__dict__", {})}
    if not found and _is_default(value, "__reduce_ex__") and _is_default(value, "__repr__"):
        state = value.__reduce_ex__(2)
        return [(".__reduce__()", state[1:3])] if isinstance(state, tuple) else []
    return [(f".{name}", part) for name, part in found.items()]


def _in_words(value: Any) -> str:
    """What has no parts is known by its own representation."""
    has_address = _is_default(value, "__repr__") or " at 0x" in (shown := repr(value)[:2000])
    return type(value).__qualname__ if has_address else shown


def _is_default(value: Any, name: str) -> bool:
    return getattr(type(value), name) is getattr(object, name)


def _of_tensor(path: str, kind: str, tensor: torch.Tensor, depth: int) -> Iterator[Leaf]:
    plain = tensor.detach()
    if plain.is_nested or plain.is_quantized or plain.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(f"{_named(path)} is a tensor of a kind that is not compared: {plain.dtype}, {plain.layout}")
    what = f"{kind}, {plain.dtype}, {list(plain.shape)}, {plain.layout}, {plain.device.type}"
    if tensor.requires_grad:
        what += ", requires_grad"
    parts = {f".{name}": part for name, part in getattr(tensor, "__dict__", {}).items()}
    if plain.layout is torch.sparse_coo:
        yield Leaf(path, what, plain._nnz())
        parts |= {".indices()": plain._indices(), ".values()": plain._values()}
    else:
        floats = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        kept = floats.resolve_neg() if floats.is_neg() else floats
        yield Leaf(path, what, _checksum(_bytes_of(kept)), _rounded_tensor(kept) if kept.is_floating_point() else None)
    for name, part in parts.items():
        yield from _leaves(path + name, part, depth - 1)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if not tensor.numel():
        return np.zeros(0, dtype=np.uint8)
    # `as_subclass`: a batch class' own __torch_function__ stays out of it.
    flat = tensor.as_subclass(torch.Tensor).contiguous().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy()


def _rounded_tensor(tensor: torch.Tensor) -> tuple[float, list[float]] | None:
    plain = tensor.as_subclass(torch.Tensor)
    if plain.dtype in (torch.float64, torch.float32):
        return _rounded(plain.contiguous().cpu().reshape(-1).numpy())
    short = plain.reshape(-1)[:: max(1, plain.numel() // PROBES)].cpu()
    return _rounded(short.to(torch.float32).numpy(), SHORT_ULPS * torch.finfo(plain.dtype).eps)


def _of_array(path: str, kind: str, array: np.ndarray[Any, Any], depth: int) -> Iterator[Leaf]:
    what = f"{kind}, {array.dtype}, {list(array.shape)}"
    if array.dtype.hasobject:  # its bytes are addresses
        yield Leaf(path, what, array.size)
        yield from _leaves(path, array.tolist(), depth - 1)
        return
    flat = np.ascontiguousarray(array).reshape(-1)
    rounded = _rounded(flat) if array.dtype.kind == "f" and array.dtype.itemsize in (4, 8) else None
    yield Leaf(path, what, _checksum(flat.view(np.uint8) if flat.size else flat), rounded)


def _checksum(data: np.ndarray[Any, Any]) -> int:
    if data.nbytes <= MOST_BYTES:
        return zlib.crc32(data.tobytes())
    checksum, step = data.nbytes, data.nbytes // (MOST_BYTES // BLOCK)
    for begin in range(0, data.nbytes, step):
        checksum = zlib.crc32(data[begin : begin + BLOCK].tobytes(), checksum)
    return checksum


def _rounded(flat: np.ndarray[Any, Any], unit: float | None = None) -> tuple[float, list[float]] | None:
    """Some values and, of what is read, the largest difference that may be rounding; whole numbers are never rounded."""
    probes = flat[:: max(1, flat.size // PROBES)].astype(np.float64)
    finite = probes[np.isfinite(probes)]
    if not finite.size or bool((finite == np.round(finite)).all()):
        return None
    if unit is None:
        unit = ULPS * float(np.finfo(flat.dtype).eps)
    some = flat[: MOST_BYTES // flat.itemsize]
    means = [float(some.mean(dtype=np.float64)), float(some[::2].mean(dtype=np.float64))]
    return unit * float(np.abs(finite).max()), [*probes.tolist(), *means]
