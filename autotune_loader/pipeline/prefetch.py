"""Copy batches to an accelerator ahead of the training loop, on a stream of their own.

loader stream       copy 1   copy 2   copy 3
training stream              step 1   step 2   step 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autotune_loader.pipeline.batches import move
from autotune_loader.values import LoaderConfig, require_int

ASKED = (
    *("Event", "Stream", "stream", "current_stream", "synchronize"),
    *("set_device", "mem_get_info", "max_memory_allocated"),
)
"""What torch's module of an accelerator must have: a timeline of marks, streams beside one another, and its memory."""


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
        instead = "device='cpu', or in tune() train_step=0.05 (the seconds of one step) would work"
        raise ValueError(f"device={str(device)!r} has no streams and timed events in PyTorch; {instead}")
    count = module.device_count()  # of CUDA by NVML: it does not open the driver
    if (chosen.index or 0) >= count:
        raise ValueError(f"device={str(device)!r} does not exist (PyTorch sees {count}); device='cpu' would work")
    return module


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
        self.device = torch.device(device)
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
    """The loader's batches through `lane`, `depth` of them ahead; its exception comes after what came before it.

    Args:
        loader: any iterable of batches.
        lane: a `Lane`, or what has its `send` and `receive`.
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
