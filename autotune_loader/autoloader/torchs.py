"""Private names of torch that AutoLoader and `run` stand on; tests/autoloader/test_torchs.py names what has changed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _utils as torch_utils
from torch.utils.data import _utils, dataloader
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, pin_memory, signal_handling, worker

CHECK_EVERY_S = MP_STATUS_CHECK_INTERVAL
BaseIter: Any = dataloader._BaseDataLoaderIter
LoopIter: Any = dataloader._SingleProcessDataLoaderIter
WorkersIter: Any = dataloader._MultiProcessingDataLoaderIter
ITERABLE = dataloader._DatasetKind.Iterable
ExceptionWrapper: Any = torch_utils.ExceptionWrapper
ResumeIteration: Any = worker._ResumeIteration
worker_loop: Any = worker._worker_loop
pin: Any = pin_memory.pin_memory
signals: Any = signal_handling


def is_exiting() -> bool:
    """Whether the interpreter ends, and modules may be gone."""
    return _utils is None or _utils.python_exit_status is not False


def worker_info() -> Any:
    """What `get_worker_info()` tells here."""
    return worker._worker_info


def share_by(storage: Callable[[int], Any], least: int) -> None:
    """In a worker: where torch's collate function asks for shared memory of more than `least` bytes, it gets that."""
    own: Any = torch.UntypedStorage._new_shared.__func__  # type: ignore[attr-defined]

    def new_shared(kind: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type != "cpu":
            return own(kind, size, device=device)
        return storage(size) if size > least else kind(size, device=device)

    torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment, method-assign]


@contextlib.contextmanager
def without_handler() -> Iterator[None]:
    """In this block torch does not leave its handler of SIGCHLD behind, which raises wherever the loop is."""
    was_set, handler = signals._SIGCHLD_handler_set, signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if not was_set and handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
            signals._SIGCHLD_handler_set = False


def forget_processes(iterator: Any) -> None:
    """Torch's handler of SIGCHLD, which another loader may have set, does not look at these workers."""
    if iterator._worker_pids_set:
        signals._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
