"""Copy batches to the device ahead of the training loop, on a CUDA stream of their own.

loader stream       copy 1   copy 2   copy 3
training stream              step 1   step 2   step 3
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from autotune_loader.pipeline.batches import fields_of, is_dataclass
from autotune_loader.values import LoaderConfig, require_int


class DevicePrefetcher:
    """Iterates a loader, with every batch on `device`; on CUDA, copied while the step before it runs.

    Batches may be nested: tensors, mappings, sequences, named tuples, dataclasses, and objects with a `.to()` method; what is
    none of these passes through. Order and number of batches are the loader's own, and an exception of the loader comes
    after the batches before it. Copying overlaps only from pinned memory.

    Args:
        loader: Any iterable of batches; `len()` works if it works on the loader.
        device: Where batches go: "cuda", "cuda:1", 1, "cpu", a `torch.device`.
        depth: Batches that are ahead of the training loop; each takes its size in device memory. Without CUDA there are none.

    Raises:
        TypeError: `depth` is not an integer.
        ValueError: `depth` is below 1.
        RuntimeError: `device` is CUDA and there is none.
    """

    def __init__(self, loader: Iterable[Any], device: Any, depth: int = 1) -> None:
        require_int("depth", depth, minimum=1)
        self.loader = loader
        self.device = torch.device(device)
        self.depth = depth
        if self.device.type == "cuda" and not torch.cuda.device_count():  # asks NVML, and does not open the driver
            raise RuntimeError(f"device={device!r} needs CUDA, which is not available here; device='cpu' would work")
        self._lane: CudaLane | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            return (move(batch, self.device) for batch in self.loader)
        if self._lane is None:  # kept: each new stream would fill a memory pool of its own
            self._lane = CudaLane(self.device)
        return prefetched(self.loader, self._lane, self.depth)


def prefetched_as_tuned(loader: Any, config: LoaderConfig, device: Any) -> Any:
    """The loader behind a `DevicePrefetcher` of the tuned depth; itself where none was tuned, or off CUDA."""
    if not config.device_prefetch or torch.device(device).type != "cuda":
        return loader
    return DevicePrefetcher(loader, device, depth=config.device_prefetch)


def prefetched(loader: Iterable[Any], lane: Any, depth: int) -> Iterator[Any]:
    """The loader's batches through `lane`, `depth` of them ahead; its exception comes after what came before it.

    Args:
        loader: any iterable of batches.
        lane: `CudaLane`, or what has its `send` and `receive`.
        depth: how many are ahead.
    """
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


class CudaLane:
    """Copies on a side stream of one device, each beside the step that is launched after it was begun."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Begin to copy; the batch, and an event behind the copy, are to be given to `receive`."""
        # The allocator hands memory of batches that have been dropped to the next copy: their steps must be done by then.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            return move(batch, self._device), self.stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """The batch on the device, safe to use on the current stream."""
        moved, copied = sent
        torch.cuda.current_stream(self._device).wait_event(copied)
        return moved


def move(batch: Any, device: Any) -> Any:
    """The batch with all that can move on `device`; containers are new, of the same type; what cannot move is kept."""
    to = None if isinstance(batch, type) else getattr(batch, "to", None)
    if callable(to):
        try:
            return to(device, non_blocking=True)
        except TypeError:  # a method of the user's that does not take it
            return to(device)
    return rebuilt(batch, lambda value: move(value, device))


def fresh(batch: Any) -> Any:
    """The batch in containers of its own, for a step that takes things out of them; what is no container is the same."""
    return rebuilt(batch, fresh)


def rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A new container of the same type with what a function makes of each value; what is no container is kept."""
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
    return batch
