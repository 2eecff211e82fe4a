"""What a batch is made of, whatever library made it: its fields, its tensors, and a few words for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree


def fields_of(batch: Any) -> dict[Any, Any]:
    """What a batch object holds by name: a mapping's items, or the attributes of a dataclass, of PyG's `Data` and the like."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    if callable(getattr(batch, "to_dict", None)) and hasattr(batch, "to"):
        return dict(batch.to_dict())
    return dict(vars(batch)) if hasattr(batch, "__dict__") else {}


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)
    elif isinstance(batch, Mapping) or callable(getattr(batch, "to_dict", None)):
        for value in fields_of(batch).values():
            yield from tensors_in(value)
    else:
        yield from (value for value in fields_of(batch).values() if isinstance(value, torch.Tensor))


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that a tensor holds, also where it is sparse."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def record_of(batch: Any) -> list[bytes]:
    """Its values in order: the same of equal batches, whatever process made them; of objects without a value their type."""
    return [_record(leaf) for leaf in _pytree.tree_leaves(batch)]


def _record(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        return repr((value.dtype, value.shape)).encode() + plain.view(torch.uint8).numpy().tobytes()
    if hasattr(value, "tobytes") and not getattr(getattr(value, "dtype", None), "hasobject", False):
        return bytes(value.tobytes())
    shows_address = getattr(type(value), "__repr__", None) == object.__repr__
    return repr(type(value) if shows_address else value).encode()


def samples_in(batch: Any) -> int | None:
    """Samples of a batch that nobody counted: the first dimension of its first tensor; None where it has none."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim()), None)
    if first is not None:
        return first.size(0)
    return len(batch) if isinstance(batch, list) else None


def described(batch: Any) -> str:
    """A batch in a few words: its type, and its keys, elements or shape."""
    if isinstance(batch, torch.Tensor):
        return f"a tensor {list(batch.shape)}"
    if isinstance(batch, (tuple, list)):
        inner = ", ".join(_in_a_word(each) for each in batch[:4]) + (", ..." if len(batch) > 4 else "")
        return f"a {type(batch).__name__} of {len(batch)}: {inner}"
    fields = fields_of(batch)
    if not fields:
        return f"a batch of type {type(batch).__name__}"
    kind = f"a {type(batch).__name__} with " + ("keys" if isinstance(batch, Mapping) else "attributes")
    return f"{kind} {', '.join(map(str, list(fields)[:12]))}"


def _in_a_word(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(each, (int, float)) for each in value)
