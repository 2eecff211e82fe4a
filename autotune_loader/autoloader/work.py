"""What runs in a worker: made harmless first, then it fetches what it is told to, one message for each batch.

socket ── job ─► seeds ── fetch ── collate ─► (turn, number, batch, times, what has changed) ── socket
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from autotune_loader.autoloader.parts import Noted, Parts
from autotune_loader.autoloader.seeds import Seeds, mixed
from autotune_loader.machine import messages
from autotune_loader.machine.elsewhere import cut_channels, die_with_owner, own_files

IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that are for the loop, such as Ctrl-C; others whose handlers are inherited end the worker."""


@dataclass(frozen=True, eq=False)
class Sent:
    """What a worker is sent, in one piece: what is one object in the loop is one object there."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    init_fn: Callable[[int], None] | None
    batched: bool
    """Whether samples are collated; False where the dataset makes the batches."""

    def fetcher(self, cpu_clock: Callable[[], float]) -> Callable[[Any], Any]:
        """What makes a batch of indices, as torch does, and its times (fetch_start, fetch_end, collate_end, cpu_s)."""
        torchs: Any = _MapDatasetFetcher
        make, clock = torchs(self.dataset, self.batched, self.collate_fn, drop_last=False).fetch, time.monotonic

        def fetch(indices: Any) -> tuple[Any, tuple[float, ...]]:
            cpu, begun = cpu_clock(), clock()
            batch, end = make(indices), clock()
            return batch, (begun, end, end, cpu_clock() - cpu)  # collating is a part of fetching here

        return fetch

    @property
    def named(self) -> dict[str, Any]:
        """By the names that people know them by."""
        return {"dataset": self.dataset, "collate_fn": self.collate_fn}


def work(end: socket.socket, sent: Sent, worker: int, count: int, seed: int) -> None:
    """The life of a worker.

    Args:
        end: its end of the socket.
        sent: of the user.
        worker: `get_worker_info().id`.
        count: `get_worker_info().num_workers`.
        seed: of its random numbers until the first batch, without its number.
    """
    parts, noted, failure = Parts(sent.named), None, None
    _become_harmless(end, parts.channels)
    torch.set_num_threads(1)
    messages.collate_without_sharing()
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    np.random.seed(torch_worker._generate_state(seed, worker))
    info = torch_worker.WorkerInfo(id=worker, num_workers=count, seed=seed + worker, dataset=sent.dataset)
    torch_worker._worker_info = info
    try:
        if sent.init_fn is not None:
            sent.init_fn(worker)
    except Exception:
        failure = _failure(worker)
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    fetch, seeds, jobs = sent.fetcher(time.process_time), Seeds(parts.generators), deque[Any]()
    try:
        while True:
            turn, number, epoch_seed, initial_seed, indices = _next_job(end, jobs)
            batch, times = failure, (0.0, 0.0, 0.0, 0.0)
            try:
                if failure is None:
                    seeds.begin(mixed(epoch_seed, number), initial_seed)
                    batch, times = fetch(indices)
            except Exception:
                batch = _failure(worker)
            changed = None if noted is None else noted.changed()
            if noted is None or changed is not None:  # the first fetch may make something ready
                parts = Parts(sent.named)
                noted, seeds = Noted(parts), Seeds(parts.generators)
            try:
                messages.send(end, (turn, number, batch, times, changed))
            except ConnectionError:
                raise
            except Exception:  # it cannot be pickled, or there is no room
                messages.send(end, (turn, number, _failure(worker), times, changed))
            del batch
    except (EOFError, ConnectionError):  # the loop has hung up
        pass


def _next_job(end: socket.socket, waiting: deque[Any]) -> Any:
    """What the loop asks for next; a job without a number takes back those before it."""
    while True:
        try:
            job = messages.receive(end, None if waiting else 0.0)
        except BlockingIOError:
            return waiting.popleft()
        if job[1] is None:
            waiting.clear()
        else:
            waiting.append(job)


def _failure(worker: int) -> ExceptionWrapper:
    return ExceptionWrapper(where=f"in DataLoader worker process {worker}")


def _become_harmless(end: socket.socket, channels: list[int]) -> None:
    die_with_owner()
    own_files(writable=True)
    if getattr(multiprocessing.current_process(), "_start_method", "fork") == "fork":  # the others inherit nothing
        cut_channels([end.fileno(), *channels])
    torch._C._set_worker_signal_handlers()
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_IGN if each in IGNORED else signal.SIG_DFL)
