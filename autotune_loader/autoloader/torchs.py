"""Private names of torch that AutoLoader and `run` stand on; tests/autoloader/test_torchs.py names what has changed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import _utils as torch_utils
from torch.utils.data import DataLoader, _utils, dataloader
from torch.utils.data._utils import pin_memory, signal_handling, worker


def named(module: ModuleType, *names: str) -> Any:
    """What a module of torch has by the first of these names that it knows: versions differ.

    Raises:
        ImportError: it knows none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(
        f"torch {torch.__version__} has no {' and no '.join(names)} in {module.__name__}, which AutoLoader and `run` need. "
        "Try another version of autotune-loader or of torch.",
        name=module.__name__,
    )


CHECK_EVERY_S: float = named(_utils, "MP_STATUS_CHECK_INTERVAL", "STATUS_CHECK_INTERVAL")  # pytorch#161044
WorkersIter: Any = dataloader._MultiProcessingDataLoaderIter
ITERABLE = dataloader._DatasetKind.Iterable
fetcher: Any = dataloader._DatasetKind.create_fetcher
ExceptionWrapper: Any = torch_utils.ExceptionWrapper
worker_loop: Any = named(worker, "_worker_loop", "_process_worker_loop")  # pytorch#161044
is_profiling: Any = named(torch.autograd, "_profiler_enabled")
pin: Any = pin_memory.pin_memory
signals: Any = signal_handling


HOLDER = "dataset_holder"
"""A list with the dataset, out of which the worker loop of torch 2.14 takes it."""


@functools.cache
def parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def with_dataset(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the worker loop with the dataset itself, by its name."""
    rest = {name: value for name, value in arguments.items() if name != HOLDER}
    return rest | ({"dataset": arguments[HOLDER][0]} if HOLDER in arguments else {})


def as_taken(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same as this torch's worker loop takes them."""
    if HOLDER not in parameters(worker_loop):
        return arguments
    return {name: value for name, value in arguments.items() if name != "dataset"} | {HOLDER: [arguments["dataset"]]}


if TYPE_CHECKING:
    LoaderOf = DataLoader
else:

    class LoaderOf:
        """`LoaderOf[T]` is `DataLoader[T]`, or `DataLoader[T, Any]` where batches have a parameter, too (pytorch#179707)."""

        def __class_getitem__(cls, sample: Any) -> Any:
            parameters = sample, *[Any] * (len(DataLoader.__parameters__) - 1)
            return DataLoader[parameters]


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
    """In this block torch sets no handler of SIGCHLD, which raises wherever the loop is."""
    was_set, signals._SIGCHLD_handler_set = signals._SIGCHLD_handler_set, True
    try:
        yield
    finally:
        signals._SIGCHLD_handler_set = was_set


def forget_processes(iterator: Any) -> None:
    """Torch's handler of SIGCHLD, which another loader may have set, does not look at these workers."""
    if iterator._worker_pids_set:
        signals._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
