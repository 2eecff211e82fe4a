"""Copy batches to the device ahead of the training loop, on a CUDA stream of their own.

loader stream       copy 1   copy 2   copy 3
training stream              step 1   step 2   step 3
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from autotune_loader.pipeline.batches import mapped
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.validation import require_int

_Loader = TypeVar("_Loader", bound=Iterable[Any])


class DevicePrefetcher:
    """Iterates a loader, with every batch on `device`; on CUDA, copied while the step before it runs.

    Batches may be nested: tensors, mappings, sequences, named tuples, dataclasses, and objects with a `.to()` method; what is
    none of these passes through. Order and number of batches are the loader's own, and an exception of the loader comes
    after the batches before it. Copying overlaps only from pinned memory.

    Args:
        loader: Any iterable of batches; `len()` works if it works on the loader.
        device: Where batches go: "cuda", "cuda:1", 1, "cpu", a `torch.device`.
        depth: Batches that are ahead of the training loop; each takes its size in device memory. Without CUDA there are none.
        non_blocking: As in `Tensor.to`.

    Raises:
        TypeError: `depth` is not an integer.
        ValueError: `depth` is below 1.
        RuntimeError: `device` is CUDA and there is none.
    """

    def __init__(self, loader: Iterable[Any], device: Any, depth: int = 1, non_blocking: bool = True) -> None:
        require_int("depth", depth, minimum=1)
        self.loader = loader
        self.device = torch.device(device)
        self.depth = depth
        self.non_blocking = non_blocking
        if self.device.type == "cuda" and not torch.cuda.device_count():  # asks NVML, and does not open the driver
            raise RuntimeError(f"device={device!r} needs CUDA, which is not available here; device='cpu' would work")
        self._lane: CudaLane | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            return (move(batch, self.device, non_blocking=self.non_blocking) for batch in self.loader)
        if self._lane is None:  # kept: each new stream would fill a memory pool of its own
            self._lane = CudaLane(self.device, non_blocking=self.non_blocking)
        return prefetched(self.loader, self._lane, self.depth)


def prefetched_as_tuned(loader: _Loader, config: LoaderConfig, device: Any) -> _Loader | DevicePrefetcher:
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
    batches: Iterator[Any] | None = iter(loader)
    failure: Exception | None = None
    try:
        while batches is not None or ahead:
            while batches is not None and len(ahead) <= depth:
                try:
                    ahead.append(lane.send(next(batches)))
                except StopIteration:
                    batches = None
                except Exception as error:
                    batches, failure = None, error
            if ahead:
                yield lane.receive(ahead.popleft())
        if failure is not None:
            raise failure
    finally:
        # An exception that someone keeps holds this frame: it must not hold the loader's workers or device memory.
        batches = failure = None
        ahead.clear()


class CudaLane:
    """Copies on a side stream of one device, each beside the step that is launched after it was begun."""

    def __init__(self, device: Any, *, non_blocking: bool) -> None:
        self._device, self._non_blocking = device, non_blocking
        self.stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Begin to copy; the answer is to be given to `receive`."""
        # The allocator hands memory of batches that have been dropped to the next copy: their steps must be done by then.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.copy(batch)

    def copy(self, batch: Any) -> tuple[Any, Any]:
        """The copy itself, and an event behind it."""
        with torch.cuda.stream(self.stream):
            moved = move(batch, self._device, non_blocking=self._non_blocking)
            return moved, self.stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """The batch on the device, safe to use on the current stream."""
        moved, copied = sent
        torch.cuda.current_stream(self._device).wait_event(copied)
        return moved


def move(batch: Any, device: Any, *, non_blocking: bool = True) -> Any:
    """The batch with all that can move on `device`; containers are new, of the same type; what cannot move is kept."""

    def moved(leaf: Any) -> Any:
        to = None if isinstance(leaf, type) else getattr(leaf, "to", None)
        if not callable(to):
            return leaf
        takes_it = isinstance(leaf, torch.Tensor) or _takes_non_blocking(to)
        return to(device, non_blocking=non_blocking) if takes_it else to(device)

    return mapped(moved, batch)


def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # written in C
        return False
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
