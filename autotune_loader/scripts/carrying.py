"""How a batch takes along when it was made, without a frame of ours around anything of the user's.

    fetcher: `if self.auto_collation` ──► begun       ... dataset, collate_fn: as without us ...       queue.put ──► made

A spawned worker imports this module and none other of ours. Dataset, collate_fn and worker_init_fn are the user's own objects.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

Fetch = tuple[int, float, float, float, float]
"""Worker (-1 for the training process), begin, end, end once more (collating is not told apart), seconds of CPU."""
MAIN_PROCESS = -1
NO_BATCHES = (ExceptionWrapper, _IterableDatasetStopIteration)


class Carried(NamedTuple):
    """A batch on its way from a worker."""

    batch: Any
    fetch: Fetch


class Carrying(int):
    """torch's flag `auto_collation`: what fetches looks at it first, once for each batch."""

    begun: float | None = None
    _cpu_begun = 0.0

    def __bool__(self) -> bool:
        # In the training process the step's threads must not count; in a worker every thread works for the batch.
        self._cpu_begun = time.thread_time() if get_worker_info() is None else time.process_time()
        self.begun = time.monotonic()
        return self != 0

    def fetched(self) -> Fetch | None:
        """When the batch was made that is there now; None where nobody looked at the flag."""
        begun, self.begun = self.begun, None
        if begun is None:
            return None
        end, info = time.monotonic(), get_worker_info()
        cpu = time.thread_time() if info is None else time.process_time()
        return MAIN_PROCESS if info is None else info.id, begun, end, end, cpu - self._cpu_begun


class CarryingQueue:
    """torch's queue of finished batches, into which a worker puts them together with their times."""

    def __init__(self, queue: Any, flag: Carrying) -> None:
        self._queue, self._flag, self.get = queue, flag, queue.get

    def put(self, item: Any, *args: Any, **arguments: Any) -> None:
        """As the queue's own."""
        number, data = item
        fetch = self._flag.fetched()
        if fetch is not None and isinstance(number, int) and not isinstance(data, NO_BATCHES):
            item = number, Carried(data, fetch)
        self._queue.put(item, *args, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return CarryingQueue, (self._queue, self._flag)
