"""What a batch is made of, whatever library made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def fields_of(batch: Any) -> dict[Any, Any]:
    """What a batch object holds by name: a mapping's items, or the attributes of a dataclass, of PyG's `Data` and the like."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if is_dataclass(batch):
        return {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    if callable(getattr(batch, "to_dict", None)) and hasattr(batch, "to"):
        return dict(batch.to_dict())
    return dict(vars(batch)) if hasattr(batch, "__dict__") else {}


def is_dataclass(batch: Any) -> bool:
    """Whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested batch, and those that its objects have as attributes."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from tensors_in(each)
    elif isinstance(batch, Mapping) or is_dataclass(batch) or callable(getattr(batch, "to_dict", None)):
        for each in fields_of(batch).values():
            yield from tensors_in(each)
    else:
        yield from (value for value in fields_of(batch).values() if isinstance(value, torch.Tensor))


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
        inner = [
            f"tensor {[*each.shape]}" if isinstance(each, torch.Tensor) else type(each).__name__ for each in batch[:4]
        ]
        return f"a {type(batch).__name__} of {len(batch)}: {', '.join(inner)}{', ...' * (len(batch) > 4)}"
    fields = fields_of(batch)
    if not fields:
        return f"a batch of type {type(batch).__name__}"
    kind = f"a {type(batch).__name__} with " + ("keys" if isinstance(batch, Mapping) else "attributes")
    return f"{kind} {', '.join(map(str, list(fields)[:12]))}"


def _bytes_of(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


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
            bytes=sum(_bytes_of(tensor) for tensor in tensors),
            tensors=len(tensors),
            on_accelerator=any(tensor.device.type != "cpu" for tensor in tensors),
        )
