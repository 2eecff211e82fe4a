"""What runs in a worker: made harmless first, then it fetches what it is told to, one message for each batch.

socket ── (ticket, seed, initial seed, indices) ─► seeds ── fetch ── collate ─► (ticket, times, has changed, batch) ── socket
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

from autotune_loader.autoloader import transport
from autotune_loader.autoloader.parts import Parts
from autotune_loader.autoloader.seeds import Seeds
from autotune_loader.machine.elsewhere import cut_channels, die_with_owner, own_files

Job = tuple[int, int, int, Any]
"""ticket, seed of the batch, what `torch.initial_seed()` tells, indices"""
CANCELLED = -1
"""In place of a ticket: all that was asked for before is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a worker is sent, in one piece: what is one object in the loop is one object there."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    init_fn: Callable[[int], None] | None
    batched: bool
    """Whether samples are collated; False where the dataset makes the batches."""

    def fetcher(self, cpu_clock: Callable[[], float]) -> Callable[[Any], tuple[Any, tuple[float, float, float, float]]]:
        """What makes a batch of indices, and tells when fetching began and ended, when it was collated, and CPU seconds."""
        dataset, collate, batched, clock = self.dataset, self.collate_fn, self.batched, time.monotonic
        many = getattr(dataset, "__getitems__", None) if batched else None

        def fetch(indices: Any) -> tuple[Any, tuple[float, float, float, float]]:
            cpu, begun = cpu_clock(), clock()
            if not batched:
                samples = dataset[indices]
            elif many:
                samples = many(indices)
            else:
                samples = [dataset[index] for index in indices]
            fetched = clock()
            batch = collate(samples)
            return batch, (begun, fetched, clock(), cpu_clock() - cpu)

        return fetch

    def named(self) -> dict[str, Any]:
        """By the names that people know them by."""
        return {"dataset": self.dataset, "collate_fn": self.collate_fn}


def work(end: socket.socket, sent: Sent, number: int, count: int, seed: int) -> None:
    """The life of a worker.

    Args:
        end: its end of the socket.
        sent: of the user.
        number: `get_worker_info().id`.
        count: `get_worker_info().num_workers`.
        seed: of its random numbers until the first batch, without its number.
    """
    parts = Parts(sent.named())
    _become_harmless(end, parts.channels)
    torch.set_num_threads(1)
    transport.collate_into_files()
    random.seed(seed + number)
    torch.manual_seed(seed + number)
    np.random.seed(torch_worker._generate_state(seed, number))
    info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed + number, dataset=sent.dataset)
    torch_worker._worker_info = info
    failure = None
    try:
        if sent.init_fn is not None:
            sent.init_fn(number)
    except Exception:
        failure = ExceptionWrapper(where=f"in DataLoader worker process {number}")
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    jobs, fetch, seeds, noted = _Jobs(end), sent.fetcher(time.process_time), Seeds(parts.generators), parts.noted()
    while (job := jobs.next()) is not None:
        ticket, batch_seed, initial_seed, indices = job
        times = (0.0, 0.0, 0.0, 0.0)
        try:
            if failure is None:
                seeds.begin(batch_seed, initial_seed)
                batch, times = fetch(indices)
            else:
                batch = failure
        except Exception:
            batch = ExceptionWrapper(where=f"in DataLoader worker process {number}")
        changed = noted.changed()
        if changed is not None:
            parts = Parts(sent.named())
            noted, seeds = parts.noted(), Seeds(parts.generators)
        try:
            transport.send(end, (ticket, times, changed, batch))
        except BrokenPipeError:
            return
        except Exception:  # it cannot be pickled, or there is no room
            batch = ExceptionWrapper(where=f"in DataLoader worker process {number}")
            transport.send(end, (ticket, times, changed, batch))
        del batch


def _become_harmless(end: socket.socket, channels: list[int]) -> None:
    die_with_owner()
    own_files(writable=True)
    if getattr(multiprocessing.current_process(), "_start_method", "fork") == "fork":  # the others inherit nothing
        cut_channels([end.fileno(), *channels])
    torch._C._set_worker_signal_handlers()
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)) and each != signal.SIGINT:
            signal.signal(
                each, signal.SIG_IGN if each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP) else signal.SIG_DFL
            )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the loop


class _Jobs:
    """What the loop has asked for and not taken back."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._waiting: deque[Job] = deque()

    def next(self) -> Job | None:
        """The next job; None once the loop is gone."""
        flags = 0 if not self._waiting else socket.MSG_DONTWAIT
        try:
            while True:
                job = transport.receive(self._end, flags)
                if job[0] == CANCELLED:
                    self._waiting.clear()
                else:
                    self._waiting.append(job)
                flags = socket.MSG_DONTWAIT if self._waiting else 0
        except BlockingIOError:
            return self._waiting.popleft()
        except (EOFError, ConnectionError):
            return None
