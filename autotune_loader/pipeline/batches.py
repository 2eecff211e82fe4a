"""Batches, whatever library makes them: what they are made of, and their way to an accelerator, ahead of the training loop.

loader stream       copy 1   copy 2   copy 3
training stream              step 1   step 2   step 3
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from autotune_loader.values import LoaderConfig, require_int

ASKED = (
    *("Event", "Stream", "stream", "current_stream", "synchronize"),
    *("set_device", "mem_get_info", "max_memory_allocated"),
)
"""What torch's module of an accelerator must have: a timeline of marks, streams beside one another, and its memory."""


def fields_of(batch: Any) -> dict[Any, Any]:
    """What a batch object holds by name: a mapping's items, or the attributes of a dataclass, of PyG's `Data` and the like."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if _is_dataclass(batch):
        return {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    if callable(getattr(batch, "to_dict", None)) and hasattr(batch, "to"):
        return dict(batch.to_dict())
    return dict(vars(batch)) if hasattr(batch, "__dict__") else {}


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested batch, and those that its objects have as attributes."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from tensors_in(each)
    else:
        is_container = isinstance(batch, Mapping) or _is_dataclass(batch) or callable(getattr(batch, "to_dict", None))
        for each in fields_of(batch).values():
            if is_container or isinstance(each, torch.Tensor):
                yield from tensors_in(each)


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
    kind = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        inner = [
            f"tensor {[*each.shape]}" if isinstance(each, torch.Tensor) else type(each).__name__ for each in batch[:4]
        ]
        return f"a {kind} of {len(batch)}: {', '.join(inner)}{', ...' * (len(batch) > 4)}"
    if not (fields := fields_of(batch)):
        return f"a batch of type {kind}"
    names = ", ".join(map(str, list(fields)[:12]))
    return f"a {kind} with {'keys' if isinstance(batch, Mapping) else 'attributes'} {names}"


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


def _bytes_of(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:  # whose `nbytes` raises
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


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


def copied(batch: Any) -> Any:
    """The batch in containers of its own and memory of its own, which in a worker is shared: as collating makes it."""
    if not isinstance(batch, torch.Tensor):
        return _rebuilt(batch, copied)
    return default_collate([batch.detach()])[0] if batch.layout is torch.strided else batch.clone()


class Copies(Dataset[Any]):
    """A dataset of one batch of so many samples: whoever asks for any batch gets a copy."""

    def __init__(self, batch: Any, samples: int) -> None:
        self._batch, self._samples = batch, samples

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, keys: list[int]) -> Any:
        return copied(self._batch)


def locked_bytes(batch: Any) -> int:
    """Memory that torch locks to pin a batch: a block for each tensor, whose size is a power of two."""
    return sum(1 << (_bytes_of(tensor) - 1).bit_length() for tensor in tensors_in(batch) if _bytes_of(tensor))


def _moves(batch: Any) -> bool:
    return not isinstance(batch, type) and callable(getattr(batch, "to", None))


def _apart(batch: Any) -> Any:
    """What its `to` may change: that of transformers and PyTorch Geometric works in place."""
    return copy.copy(batch) if _moves(batch) and not isinstance(batch, torch.Tensor) else batch


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A new container of the same type with what a function makes of each value; what is none and does not move is kept."""
    if _is_dataclass(batch):
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


def accelerator(device: Any) -> Any:
    """Torch's module of the accelerator that a device is of, such as `torch.cuda`; None for the CPU.

    Raises:
        ValueError: it is not there, or torch has no streams and events for it.
    """
    chosen = torch.device(device)
    if chosen.type in ("cpu", "meta"):
        return None
    module: Any = getattr(torch, chosen.type, None)
    if not all(hasattr(module, name) for name in ASKED):
        instead = "Try device='cpu', or in tune() train_step=0.05 (the seconds of one step)."
        raise ValueError(f"device={str(device)!r} has no streams and timed events in PyTorch. {instead}")
    count = module.device_count()  # of CUDA by NVML: it does not open the driver
    if (chosen.index or 0) >= count:
        raise ValueError(f"device={str(device)!r} does not exist (PyTorch sees {count}). Try device='cpu'.")
    return module


def initialized_accelerator() -> str | None:
    """The name of an accelerator that this process has initialized, such as "cuda"; asking initializes none."""
    for name in ("cuda", torch._C._get_privateuse1_backend_name()):
        module = vars(torch).get(name)
        if module is not None and module.is_initialized():
            return name
    return None


class DevicePrefetcher:
    """Iterate over a loader with every batch on `device`.

    On an accelerator, a batch is copied while the step before it runs, which needs pinned memory. Batches may be nested:
    tensors, mappings, sequences, named tuples, dataclasses, and objects with a `.to()` method; anything else is passed
    through. Order and number of batches do not change. An exception of the loader comes after the batches before it.

    Args:
        loader: Any iterable of batches; `len()` works if it works on the loader.
        device: Device of the batches: "cuda", "cuda:1", 1, "cpu", a `torch.device`.
        depth: Batches ahead of the training loop; each needs its size in device memory. On the CPU there are none.

    Raises:
        TypeError: `depth` is not an integer.
        ValueError: `depth` is below 1; or `device` does not exist, or has no streams in PyTorch.
    """

    def __init__(self, loader: Iterable[Any], device: Any, depth: int = 1) -> None:
        require_int("depth", depth, minimum=1)
        self.loader = loader
        self.device: torch.device = torch.device(device)
        self.depth = depth
        self._is_accelerated = accelerator(self.device) is not None
        self._lane: Lane | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if not self._is_accelerated:
            return (move(batch, self.device) for batch in self.loader)
        self._lane = self._lane or Lane(self.device)  # kept: each new stream would fill a memory pool of its own
        return prefetched(self.loader, self._lane, self.depth)


def prefetched_as_tuned(loader: Any, config: LoaderConfig, device: Any) -> Any:
    """The loader behind a `DevicePrefetcher` of the tuned depth; itself where none was tuned, or on the CPU."""
    if not config.device_prefetch or accelerator(device) is None:
        return loader
    return DevicePrefetcher(loader, device, depth=config.device_prefetch)


def prefetched(loader: Iterable[Any], lane: Any, depth: int) -> Iterator[Any]:
    """The loader's batches through a `Lane`, `depth` of them ahead; its exception comes after what came before it."""
    ahead: deque[Any] = deque()

    def rest() -> Iterator[Any]:
        while ahead:
            yield lane.receive(ahead.popleft())

    try:
        for batch in loader:
            ahead.append(lane.send(batch))
            del batch  # its memory is the copy's business
            if len(ahead) > depth:
                yield lane.receive(ahead.popleft())
    except Exception:
        yield from rest()
        raise
    yield from rest()


class Lane:
    """Copies on a side stream of one accelerator, each beside the step that is launched after it was begun."""

    def __init__(self, device: Any) -> None:
        self._device, self._module = device, accelerator(device)
        self.stream = self._module.Stream(device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Begin to copy; the batch, and an event behind the copy, are to be given to `receive`."""
        # The allocator hands memory of batches that have been dropped to the next copy: their steps must be done by then.
        self.stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self.stream):
            return move(batch, self._device), self.stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """The batch on the device, safe to use on the current stream."""
        moved, copied = sent
        self._module.current_stream(self._device).wait_event(copied)
        return moved
