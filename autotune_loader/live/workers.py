"""The worker processes of a pool: who they are, and that the end of one does not fall upon the training step.

Torch notices a dead worker by SIGCHLD and raises from the signal's handler, wherever the main thread is just then: in the
training step, most often. `shield` puts a handler before torch's that keeps such an error for the pool, which raises it
when it is next asked for a batch. Errors of other loaders' workers pass as before.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.util import get_temp_dir
from typing import Any

from torch.utils.data import get_worker_info

from autotune_loader.machine.facts import start_method

_shielded: weakref.WeakSet[Any] = weakref.WeakSet()


class Flag:
    """An event without a lock: a worker that is killed while it looks at `multiprocessing.Event` keeps the lock for ever.

    Torch uses `set` and `is_set` of the event by which it ends its workers, and nothing else.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)


class FailingQueue(Queue):  # type: ignore[type-arg]
    """A queue whose worker ends where a batch cannot be sent; torch's loses the batch, and the loop waits for it for ever."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        super()._on_queue_feeder_error(error, item)  # type: ignore[misc]
        if get_worker_info() is not None:
            os._exit(1)


class PoolContext(BaseContext):
    """A start method that remembers whom it started; DataLoader takes it as its `multiprocessing_context`."""

    def __init__(self, inner: BaseContext | str | None) -> None:
        method = start_method() if inner is None else inner  # asking for the default one would settle it
        self._inner: Any = method if isinstance(method, BaseContext) else multiprocessing.get_context(method)
        self.processes: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        with contextlib.suppress(OSError):
            get_temp_dir()  # of this process, which removes it; workers use it, and those that are killed remove nothing
        self.processes.append(self._inner.Process(*args, **kwargs))
        return self.processes[-1]

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802
        return FailingQueue(maxsize, ctx=self._inner)

    def Event(self) -> Any:  # noqa: N802
        return Flag(self._inner.RawValue("b", 0))

    def get_start_method(self, allow_none: bool = False) -> Any:
        return self._inner.get_start_method(allow_none)

    def dead(self) -> list[Any]:
        """The processes that have ended."""
        return [process for process in self.processes if process.exitcode is not None]


def disown(processes: Iterable[Any]) -> None:
    """Who waits for all `multiprocessing.active_children()` does not wait for these; they end with this process."""
    for process in processes:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def shield(pool: Any) -> None:
    """Keep errors about this `Pool`'s workers for it, from now on; as torch's own, the handler is the main thread's."""
    _shielded.add(pool)
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, _Handler):
        signal.signal(signal.SIGCHLD, _Handler(handler))


class _Handler:
    def __init__(self, inner: Callable[[int, Any], Any]) -> None:
        self._inner = inner

    def __call__(self, number: int, frame: Any) -> None:
        while True:
            try:
                self._inner(number, frame)
                return
            except RuntimeError as error:
                # Torch tells of one pool at a time and forgets it, so it is asked again until it is content.
                pool = next((each for each in list(_shielded) if each.take_note(error)), None)
                if pool is None or pool.is_waiting:
                    raise
                error.with_traceback(None)  # it holds the frames of the training step
