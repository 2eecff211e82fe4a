"""What a batch is made of, whatever library made it: one function that lists what it holds, one that changes it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch


def leaves(batch: Any) -> Iterator[Any]:
    """All that a nested batch holds: what is in mappings, sequences and dataclasses and is none of these itself."""
    if isinstance(batch, (Mapping, list, tuple)) or _is_dataclass(batch):
        for value in fields_of(batch).values() if not isinstance(batch, (list, tuple)) else batch:
            yield from leaves(value)
    else:
        yield batch


def mapped(change: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with each of its leaves changed; containers are new, of the same type. What moves itself is a leaf."""
    if isinstance(batch, (str, bytes, type)) or callable(getattr(batch, "to", None)):
        return change(batch)
    if _is_dataclass(batch):
        changed = copy.copy(batch)  # its constructor may not take every field, and it may be frozen
        for name, value in fields_of(batch).items():
            object.__setattr__(changed, name, mapped(change, value))
        return changed
    if isinstance(batch, Mapping):
        items = {key: mapped(change, value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return items
        changed = copy.copy(batch)  # keeps a default_factory and the like
        changed.update(items)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(change, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        values = [mapped(change, value) for value in batch]
        try:
            return type(batch)(values)
        except TypeError:  # a subclass with a constructor of its own
            return tuple(values) if isinstance(batch, tuple) else values
    return change(batch)


def fields_of(batch: Any) -> dict[Any, Any]:
    """What a batch object holds by name: a mapping's items, or the attributes of a dataclass, of PyG's `Data` and the like."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if _is_dataclass(batch):
        return {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    if callable(getattr(batch, "to_dict", None)) and hasattr(batch, "to"):
        return dict(batch.to_dict())
    return dict(vars(batch)) if hasattr(batch, "__dict__") else {}


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested batch, and those that its objects have as attributes."""
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif callable(getattr(leaf, "to_dict", None)):
            yield from tensors_in(fields_of(leaf))
        else:
            yield from (value for value in fields_of(leaf).values() if isinstance(value, torch.Tensor))


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that a tensor holds, also where it is sparse."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


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


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How much one batch carries between processes."""

    bytes: int = 0
    tensors: int = 0
    on_accelerator: bool = False

    @classmethod
    def of(cls, batch: Any) -> BatchShape:
        tensors = list(tensors_in(batch))
        return cls(
            bytes=sum(map(bytes_of, tensors)),
            tensors=len(tensors),
            on_accelerator=any(tensor.device.type != "cpu" for tensor in tensors),
        )
