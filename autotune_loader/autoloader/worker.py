"""What runs in a worker: torch's own worker loop over a channel, with the random numbers of each batch.

given ── work ── it has begun ── torch's worker loop ── job ── seeds ── fetch, collate ── batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, Subset

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.channel import WorkerEnd
from autotune_loader.autoloader.seeds import Seeds, generators_here
from autotune_loader.machine.clones import leave_signals

BEGUN, LOOKED = "begun", "looked"
"""What a worker notes: it is ready for its first job; its dataset asked for its number, or for how many workers there are."""
OF_A_WORKER = ("index_queue", "data_queue", "done_event", "worker_id", "num_workers")
OF_AN_EPOCH = ("base_seed", "shared_seed")
"""Arguments of torch's worker loop that differ between workers, and between epochs of unchanged data."""


class Given(NamedTuple):
    """What is the user's of what workers are given: it is large, and often the same in all epochs.

    Attributes:
        arguments: Of torch's worker loop, by name.
        held: Generators that dataset, transforms and collate_fn hold.
    """

    arguments: dict[str, Any]
    held: list[Any]


class Setup(NamedTuple):
    """What else the workers of one iterator are given.

    Attributes:
        is_seeded: Whether each batch is seeded.
        initial_seed: What `torch.initial_seed()` returns then; None for torch's own.
        asked: Number of workers that was asked for, which workers are told; 0 where nobody asked.
        arguments: Of torch's worker loop, by name.
    """

    is_seeded: bool
    initial_seed: int | None
    asked: int
    arguments: dict[str, Any]


class Flag:
    """What torch takes for its event that workers are to end, of which they learn by the end of their channel."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True


def work(given: Given, setup: Setup, end: WorkerEnd, number: int, count: int) -> None:
    """The life of worker `number` of so many."""
    end.begin()
    if not setup.asked:
        leave_signals()

    dataset, collate_fn = given.arguments["dataset"], given.arguments["collate_fn"]
    held = generators_here(given.held, dataset._dataset if isinstance(dataset, Threaded) else dataset, collate_fn)

    def first() -> None:
        if setup.is_seeded:
            initial_seed = torch.initial_seed() if setup.initial_seed is None else setup.initial_seed
            end.seed = Seeds(initial_seed, held).begin
            _note_looks(end, setup.asked)
        end.note = BEGUN
        end.put((None, None))

    end.first = first
    own = {"index_queue": end, "data_queue": end, "done_event": Flag(), "worker_id": number}
    loops = torchs.as_taken(given.arguments)
    torchs.worker_loop(**loops, **setup.arguments, **own, num_workers=setup.asked or count)


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
        raise ValueError(f"fetch_threads={threads} needs a map-style dataset. Try fetch_threads=None.")
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if callable(getattr(dataset, "__getitems__", None)):
        raise ValueError(
            f"fetch_threads={threads}: {type(dataset).__name__}.__getitems__ fetches a batch at once, in one thread. "
            "Try fetch_threads=None."
        )
