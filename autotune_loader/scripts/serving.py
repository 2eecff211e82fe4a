"""`run` and `tune`: what the script iterates is its own loader, and what it gets comes from an AutoLoader of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing import current_process
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.live.loader import AutoLoader
from autotune_loader.pipeline.workload import DataSide, wrapped_datasets
from autotune_loader.probe.burst_loop import BatchShape
from autotune_loader.scripts.tally import Tally
from autotune_loader.scripts.watching import Record

ON_A_DEVICE = "its batches lie on an accelerator already, where workers cannot make them"


class Served(Iterator[Any]):
    """The batches of an AutoLoader, counted.

    Args:
        loader: is kept alive as long as its batches are wanted.
        tally: told of every batch.
        between: called with the time before a batch is asked for.
        on_device: called where the batches turn out to lie on an accelerator.
    """

    def __init__(
        self,
        loader: AutoLoader[Any],
        tally: Tally,
        between: Callable[[float], None],
        on_device: Callable[[], None],
    ) -> None:
        self._loader = loader
        begun = time.monotonic()
        self._inner = iter(loader)
        self._record = _Served(loader, tally, between, on_device)
        self._record.begin(time.monotonic() - begun, is_new=True)

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        return self._record.next(next, self._inner)


class _Served(Record):
    def __init__(
        self, loader: AutoLoader[Any], tally: Tally, between: Callable[[float], None], on_device: Callable[[], None]
    ) -> None:
        super().__init__(tally)
        self._loader, self._between, self._on_device = loader, between, on_device
        self._is_first = True
        self._traces = loader.learnt[0].traces
        self._counted = self._traces.end

    def ask(self, now: float) -> None:
        super().ask(now)
        self._between(now)

    def receive(self, asked: float, batch: Any) -> Any:
        if self._is_first:
            self._is_first = False
            if BatchShape.of(batch).on_accelerator:
                self._loader.freeze()
                self._on_device()
        self.tally.receive(asked, time.monotonic(), self._noted())
        return batch

    def end(self, asked: float) -> None:
        self.tally.samples += self._noted()
        super().end(asked)

    def _noted(self) -> int:
        """Samples of the batches before this one that are not counted yet: what a batch holds says little of them."""
        noted = self._traces.block(self._counted)
        self._counted = self._traces.end
        return sum(trace.samples for trace in noted)


def why_not(loader: Any) -> str | None:
    """Why the workers of a loader may not be changed; None where they may.

    Only what can be seen without fetching anything.
    """
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return f"{kind.__name__} makes iterators of its own"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "a data pipe carries a configuration of its own into the workers"
    if isinstance(loader.dataset, IterableDataset):
        return "the samples of an IterableDataset depend on the number of workers"
    data = DataSide.from_loader(loader)
    if data.has_epochs:
        return "its dataset knows the epoch, and workers have copies of it that may not be told"
    if data.reads_by_itself:
        return "its dataset runs a loader of its own"
    if any(_holds_device_tensor(each) for each in wrapped_datasets(loader.dataset)):
        return ON_A_DEVICE
    if current_process().daemon:
        return "this process is daemonic and may not have workers"
    return None


def _holds_device_tensor(dataset: Any) -> bool:
    values = list(getattr(dataset, "__dict__", {}).values())
    several = [each for value in values if isinstance(value, (list, tuple)) for each in value[:8]]
    return any(isinstance(value, Tensor) and value.device.type != "cpu" for value in [*values, *several])
