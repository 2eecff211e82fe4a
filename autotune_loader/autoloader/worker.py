"""What runs in a worker: torch's own worker loop over a channel, with the random numbers of each batch.

given ── work ── it has begun ── torch's worker loop ── job ── seeds ── fetch, collate ── batch
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.channel import WorkerEnd
from autotune_loader.autoloader.given import Given
from autotune_loader.autoloader.seeds import Seeds

BEGUN, LOOKED = "begun", "looked"
"""What a worker notes: it is ready for its first job; its dataset asked for its number, or for how many workers there are."""
FOR_THE_TRAINING = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals such as Ctrl-C and those of schedulers, which a process that nobody asked for ignores."""


class Flag:
    """What torch takes for its event that workers are to end, of which they learn by the end of their channel."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True


def work(given: Given, end: WorkerEnd, number: int, count: int) -> None:
    """The life of worker `number` of so many."""
    end.begin()
    parts = given.taken()
    if not parts.asked:
        leave_signals()

    def first() -> None:
        if parts.is_seeded:
            initial_seed = torch.initial_seed() if parts.initial_seed is None else parts.initial_seed
            end.seed = Seeds(initial_seed, parts.held).begin
            _note_looks(end, parts.asked)
        end.note = BEGUN
        end.put((None, None))

    end.first = first
    own = {"index_queue": end, "data_queue": end, "done_event": Flag(), "worker_id": number}
    torchs.worker_loop(**parts.arguments, **own, num_workers=parts.asked or count)


def leave_signals() -> dict[int, Any]:
    """Have none of the script's handlers run in this process, which were for the training; returns them."""
    handlers: dict[int, Any] = {each: signal.getsignal(each) for each in signal.valid_signals()}
    handlers = {each: handler for each, handler in handlers.items() if callable(handler)}
    for each in handlers:
        signal.signal(each, signal.SIG_IGN if each in FOR_THE_TRAINING else signal.SIG_DFL)
    return handlers


def _note_looks(end: WorkerEnd, asked: int) -> None:
    """Tell who asks for its worker of as many as were asked for; torch's seeds are those of its real number."""
    kind: Any = type(info := torchs.worker_info())

    class Noted(kind):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in ("id", "num_workers"):
                end.note = LOOKED
            return value % asked if name == "id" and asked else value

    Noted.__name__, Noted.__qualname__, Noted.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    object.__setattr__(info, "__class__", Noted)


class Threaded:
    """A dataset whose items are fetched by threads in each worker, of which it is the `worker_init_fn` too."""

    def __init__(self, dataset: Any, threads: int, init_fn: Callable[[int], object] | None) -> None:
        self._dataset, self._threads, self._init_fn = dataset, threads, init_fn
        self._pool: ThreadPoolExecutor | None = None

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "fetch")
        return list(self._pool.map(self._dataset.__getitem__, indices))

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __call__(self, worker: int) -> None:
        object.__setattr__(torchs.worker_info(), "dataset", self._dataset)
        if self._init_fn is not None:
            self._init_fn(worker)


def require_items(dataset: Any, threads: int) -> None:
    """Refuse threads where no items are fetched one by one.

    Raises:
        ValueError: The dataset is a stream, or fetches a batch at once; `Subset`, as of `random_split`, does so if the
            dataset within it does.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(f"fetch_threads={threads} needs a map-style dataset; fetch_threads=None would work")
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if callable(getattr(dataset, "__getitems__", None)):
        raise ValueError(
            f"fetch_threads={threads}: {type(dataset).__name__}.__getitems__ fetches a batch at once, in one thread; "
            "fetch_threads=None would work"
        )
