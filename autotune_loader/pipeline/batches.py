"""What a batch is made of, whatever library made it, and the same in other containers or on another device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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


def move(batch: Any, device: Any) -> Any:
    """The batch with all that can move on `device`; containers are new, of the same type; what cannot move is kept."""
    if not _moves(batch):
        return _rebuilt(batch, lambda value: move(value, device))
    batch = _apart(batch)
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:  # a method of the user's that does not take it
        return batch.to(device)


def fresh(batch: Any) -> Any:
    """The batch in containers of its own, for a step that takes things out of them or moves them; tensors are the same."""
    return _rebuilt(batch, fresh)


def _moves(batch: Any) -> bool:
    return not isinstance(batch, type) and callable(getattr(batch, "to", None))


def _apart(batch: Any) -> Any:
    """What its `to` may change: that of transformers and PyTorch Geometric works in place."""
    return copy.copy(batch) if _moves(batch) and not isinstance(batch, torch.Tensor) else batch


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A new container of the same type with what a function makes of each value; what is none and does not move is kept."""
    if is_dataclass(batch):
        changed = copy.copy(batch)  # its constructor may not take every field, and it may be frozen
        for name, value in fields_of(batch).items():
            object.__setattr__(changed, name, change(value))
        return changed
    if isinstance(batch, Mapping):
        items = {key: change(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return items
        changed = copy.copy(batch)  # keeps a default_factory and the like
        changed.update(items)
        return changed
    if isinstance(batch, (list, tuple)):
        values = [change(value) for value in batch]
        try:
            return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
        except TypeError:  # a subclass with a constructor of its own
            return tuple(values) if isinstance(batch, tuple) else values
    return _apart(batch)
