"""How processes of bursts end: without finalising a copy of anything of the user's, which may remove a folder or a table.

A copy's `__del__`, a `weakref.finalize` and what a module has registered with `atexit` were written for the original. Shared
memory that is attached to by name belongs to whoever made it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker, util
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NoReturn, TypeVar

import torch.utils.data

from autotune_loader.machine.elsewhere import die_with_owner

T = TypeVar("T")
_held: list[Any] = []


def held(copy: T) -> T:
    """The copy, which is not finalised as long as this process lives."""
    _held.append(copy)
    return copy


def leave_segments() -> None:
    """From now on Python removes no shared memory at the end of this process but what this process has made.

    Before Python 3.13 it takes each segment that a process attaches to for one of its own.
    """
    begin: Any = SharedMemory.__init__
    if begin.__module__ == __name__:
        return

    @functools.wraps(begin, assigned=())
    def attach(segment: Any, name: str | None = None, create: bool = False, *args: Any, **options: Any) -> None:
        register = resource_tracker.register
        if not create:
            resource_tracker.register = lambda *_: None
        try:
            begin(segment, name, create, *args, **options)
        finally:
            resource_tracker.register = register

    SharedMemory.__init__ = attach  # type: ignore[assignment, method-assign]


def leave(code: int = 0) -> NoReturn:
    """End this process at once, after what was printed is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class BurstWorkerInit:
    """Runs in each new worker before the user's own `worker_init_fn`: it ends with its parent, and finalises nothing.

    Torch's workers look for their parent every 5 s, and only between batches. A spawned worker would end as any interpreter
    does, with finalisers and exit functions.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner
        self._sharing_strategy: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that inherits nothing: how tensors are handed over is set anew in it."""
        return {**self.__dict__, "_sharing_strategy": torch.multiprocessing.get_sharing_strategy()}

    def __call__(self, worker: int) -> None:
        die_with_owner()
        leave_segments()
        if self._sharing_strategy is not None:
            torch.multiprocessing.set_sharing_strategy(self._sharing_strategy)
        # The last of multiprocessing's own finalisers: the queue's thread has written its batches by then.
        util.Finalize(None, _leave_as_it_ended, exitpriority=-1_000_000)
        if self._inner is not None:
            self._inner(worker)
        held(torch.utils.data.get_worker_info())


def _leave_as_it_ended() -> None:
    leave(0 if sys.exc_info()[0] is None else 1)
