"""What runs in a worker: torch's own worker loop, over a channel.

given (pickled once for all workers) ── work ── torch's worker loop ── job ── seeds ── fetch, collate ── batch
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.channel import WorkerEnd
from autotune_loader.autoloader.seeds import Seeds

LOOKED = "looked"
"""What a worker notes whose dataset has asked for its number, or for how many workers there are."""


class Given:
    """What the workers of one iterator are given; `parts` are the arguments of `work` that are the same for all.

    Under `spawn` and `forkserver` it is pickled when the first worker starts, and the others get the same bytes: in a file of
    memory, so that no worker is waited for until it reads them.
    """

    def __init__(self, *parts: Any) -> None:
        self.parts: Any = parts
        self._file, self._files = -1, list[int]()

    def prepare(self, keep: int) -> None:
        """What is to be done first in a process that was forked, but for this descriptor of its own."""
        if (prepare := self.parts[4]) is not None:
            prepare(keep)

    def __reduce__(self) -> Any:
        popen: Any = get_spawning_popen()
        if self._file < 0:
            before, data = len(popen._fds), memoryview(ForkingPickler.dumps(self.parts))
            self._file = os.memfd_create("dataset")
            weakref.finalize(self, os.close, self._file)
            while data:
                data = data[os.write(self._file, data) :]
            self._files = popen._fds[before:]
        else:
            for file in self._files:  # of shared memory in the pickle, in the same places
                popen.duplicate_for_child(file)
        return _given, (DupFd(self._file),)


def _given(file: Any) -> Given:
    number = file.detach()
    with mmap.mmap(number, 0, prot=mmap.PROT_READ) as data:  # a position would be shared with other workers
        parts = pickle.loads(data)  # noqa: S301 - the loop's own
    os.close(number)
    return Given(*parts)


def work(given: Given, end: WorkerEnd, number: int, count: int) -> None:
    """The life of a worker.

    Args:
        given: the arguments of torch's worker loop by name, where `dataset` is in a holder the dataset; whether batches are
            seeded; what `torch.initial_seed()` tells then, None for torch's own; what to call first; the generators that
            the dataset holds.
        end: of its channel.
        number: `get_worker_info().id`.
        count: `get_worker_info().num_workers`.
    """
    end.begin()
    given.prepare(end.socket.fileno())
    arguments, holder, is_seeded, initial_seed, _, held = given.parts
    given.parts = None

    def first() -> None:
        end.seed = Seeds(torch.initial_seed() if initial_seed is None else initial_seed, list(held)).begin
        _note_looks(end)

    end.first = first if is_seeded else None
    own = {"index_queue": end, "data_queue": end, "worker_id": number, "num_workers": count}
    torchs.worker_loop(**{**arguments, **holder, **own})


def _note_looks(end: WorkerEnd) -> None:
    kind: Any = type(info := torchs.worker_info())

    class Noted(kind):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                end.note = LOOKED
            return super().__getattribute__(name)

    Noted.__name__, Noted.__qualname__, Noted.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    object.__setattr__(info, "__class__", Noted)


class Threaded:
    """A dataset whose items are fetched by threads in each worker, of which it is the `worker_init_fn` too."""

    def __init__(self, dataset: Any, threads: int, init_fn: Callable[[int], object] | None) -> None:
        self._dataset, self._threads, self._init_fn = dataset, threads, init_fn
        self._pool: ThreadPoolExecutor | None = None

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "fetch")
        return [each.result() for each in [self._pool.submit(self._dataset.__getitem__, index) for index in indices]]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __call__(self, worker: int) -> None:
        object.__setattr__(torchs.worker_info(), "dataset", self._dataset)
        if self._init_fn is not None:
            self._init_fn(worker)
