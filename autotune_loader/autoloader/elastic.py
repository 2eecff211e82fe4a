"""Torch's own iterator with workers, made elastic: batches travel in segments, and the number of workers may change.

    _try_put_index   as many batches outstanding as `active x depth`, handed to the first `active` workers in turns
    resize           starts what is missing; whoever is not needed is parked, and delivers what it has
    a lost worker    its batches are given out again; the third in a row without a batch in between is DataLoader's error

Its worker loop, seeds, errors, lifetimes, persistent workers, timeouts and pinning thread are torch's.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import time
from collections import defaultdict
from typing import Any

import torch

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.channel import Channel, Results, WorkerGone
from autotune_loader.autoloader.nursery import CLONE, Nursery, NurseryProcess, end_process
from autotune_loader.autoloader.pinning import Pinner, pinner_for
from autotune_loader.autoloader.worker import Given, Seed, Threaded, mixed, work
from autotune_loader.pipeline.loop_log import Fetch

MOST_LOSSES = 3

logger = logging.getLogger("autotune_loader.autoloader")


class View:
    """A loader with other attributes; `watched_as` is the loader as which its iterator is watched, None for none."""

    def __init__(self, loader: Any, watched_as: Any, **other: Any) -> None:
        vars(self).update(other, loader=loader, watched_as=watched_as)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)


class Flag:
    """Tells workers to end. A worker that is killed while it looks at multiprocessing's own event keeps its lock."""

    def __init__(self, real: Any) -> None:
        self._byte = real.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._byte.value)

    def set(self) -> None:
        self._byte.value = 1


class ChannelContext:
    """A multiprocessing context whose queues are channels: torch asks for its result queue first, then for one a worker.

    `also` is what `Given` takes beside the arguments of torch's worker loop.
    """

    def __init__(
        self, real: Any, also: tuple[Any, ...], asked: int, pinner: Pinner | None, *, has_nursery: bool
    ) -> None:
        self._real, self._also, self._asked, self._pinner = real, also, asked, pinner
        self._results: Results | None = None
        self._has_nursery = has_nursery and CLONE is not None and real.get_start_method() == "fork"
        self.nursery: Nursery | None = None
        self._given: Given | None = None
        self._made: Channel | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Event(self) -> Flag:  # noqa: N802 - as in multiprocessing
        return Flag(self._real)

    def Queue(self) -> Any:  # noqa: N802
        if self._results is None:
            self._results = Results(pins=self._pinner is not None)
            return self._results
        self.started()
        self._made = Channel(self._pinner)
        self._results.add(self._made)
        return self._made

    def Process(self, *, target: Any, args: Any) -> Any:  # noqa: N802
        arguments = dict(zip(inspect.signature(target).parameters, args, strict=True))  # versions differ
        if self._given is None:
            own = ("index_queue", "data_queue", "worker_id", "num_workers")
            self._given = Given({name: arguments[name] for name in arguments if name not in own}, *self._also)
            self.nursery = Nursery(self._given) if self._has_nursery else None
        return self.worker(arguments["worker_id"], arguments["num_workers"])

    def worker(self, number: int, count: int, *, is_later: bool = False) -> Any:
        """The process of a worker, over the channel that was made last; a later one sees the data as the first ones did."""
        channel = self._made
        assert channel is not None
        channel.number = number
        if self._asked:  # who asks is told of as many workers as were asked for, and the number returns to that
            number, count = number % self._asked, self._asked
        if is_later and self.nursery is not None:
            return NurseryProcess(self.nursery, channel.end, number, count)
        return self._real.Process(target=work, args=(self._given, channel.end, number, count), daemon=True)

    def close_nursery(self) -> None:
        if self.nursery is not None:
            self.nursery.close()
            self.nursery = None

    def started(self) -> None:
        """The latest worker has its end: as long as the loop had it, too, the channel would not end with the worker."""
        if self._made is not None:
            self._made.end.socket.close()


class ElasticIter(torchs.WorkersIter):  # type: ignore[misc]
    """Torch's iterator, whose number of workers may change.

    Args:
        depth: Batches that each worker has ahead.
        asked: Number of workers that was asked for, which workers are told; 0 where nobody asked.
        is_seeded: Whether each batch's random numbers are its own, whoever makes it.
        special: `initial_seed`, `prepare` and `held` of `Given`.

    Attributes:
        active: Number of workers that are given batches.
        answered: Workers that have delivered a batch.
        indices, fetch: Of the batch that was delivered last, and how it was made.
        start_s: Seconds that starting a worker took.
    """

    _worker_result_queue: Results
    _index_queues: list[Channel]
    _send_idx: int
    _rcvd_idx: int
    _tasks_outstanding: int
    _dataset: Any
    indices: Any = None
    fetch: Fetch | None = None

    def __init__(
        self, loader: Any, workers: int, depth: int, *, asked: int, is_seeded: bool, fetch_threads: int | None = None,
        is_elastic: bool = True,
        special: tuple[Any, ...] = (None, None, []),
    ) -> None:  # fmt: skip
        begun, self._process, self._is_seeded = time.monotonic(), os.getpid(), is_seeded
        self.active, self.asked = workers, asked
        self.answered = set[int]()
        self._depth, self._turn, self._losses, self._epochs, self._is_resetting = depth, 0, 0, -1, False
        self._given = dict[int, Any]()
        self._has_init_fn = loader.worker_init_fn is not None
        has_nursery = is_elastic and not self._has_init_fn and loader._dataset_kind != torchs.ITERABLE
        real = loader.multiprocessing_context or torch.multiprocessing
        pinner = pinner_for(loader)
        self._context = ChannelContext(real, (is_seeded, *special), asked, pinner, has_nursery=has_nursery)
        other = {"num_workers": workers, "prefetch_factor": depth, "multiprocessing_context": self._context}
        if pinner is not None:
            other |= {"pin_memory": False, "pin_memory_device": ""}  # torch's thread has nothing to do
        if fetch_threads is not None and not getattr(loader.dataset, "__getitems__", None):
            other["dataset"] = other["worker_init_fn"] = Threaded(loader.dataset, fetch_threads, loader.worker_init_fn)
        with torchs.without_handler():
            super().__init__(View(loader, vars(loader).get("watched_as", loader), **other))
        self._context.started()
        torchs.forget_processes(self)
        self._dataset = loader.dataset
        self._profile_name = f"enumerate(DataLoader)#{torchs.WorkersIter.__name__}.__next__"
        self.start_s = (time.monotonic() - begun) / workers

    def failed(self) -> None:
        """A worker was lost, or failed, while there were more than were asked for."""

    def seed_of(self, number: int) -> Seed:
        return mixed(self._seed, number), 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._turn, self._epochs, self._is_resetting = 0, self._epochs + 1, True
        self._given.clear()
        self._worker_result_queue.fetches.clear()
        # Torch draws a seed once for workers that are kept.
        self._seed = mixed(self._base_seed, self._epochs) >> 1 if self._epochs else self._base_seed
        try:
            super()._reset(loader, first_iter)
        finally:
            self._is_resetting = False
        if self._dataset_kind != torchs.ITERABLE:  # torch counts for `in_order=False` alone
            self._workers_num_tasks = defaultdict[int, int](int)

    @property
    def outstanding(self) -> int:
        """Batches that were given out and not delivered."""
        return int(self._send_idx - self._rcvd_idx)

    def resize(self, workers: int, depth: int) -> None:
        """From now on so many workers are given batches."""
        begun, before = time.monotonic(), self._num_workers
        while self._num_workers < workers:
            channel, process = self._started(self._num_workers, self._num_workers + 1)
            self._index_queues.append(channel)
            self._workers.append(process)
            self._workers_status.append(True)
            self._num_workers += 1
            self.start_s = (time.monotonic() - begun) / (self._num_workers - before)
        self.active, self._depth, self._turn = workers, depth, 0
        self._try_put_index()

    def _started(self, number: int, count: int) -> tuple[Channel, Any]:
        channel, process = self._context.Queue(), self._context.worker(number, count, is_later=True)
        self.answered.discard(number)
        try:
            process.start()
        except ConnectionError:  # the nursery was killed, too
            self._context.close_nursery()
            process = self._context.worker(number, count)
            process.start()
        finally:
            self._context.started()
        return channel, process

    def _try_put_index(self) -> None:
        if self._dataset_kind == torchs.ITERABLE:
            super()._try_put_index()
            return
        while self.outstanding < self.active * self._depth:
            try:
                indices = self._next_index()
            except StopIteration:
                return
            number, self._send_idx = self._send_idx, self._send_idx + 1
            self._tasks_outstanding += 1
            self._given[number] = indices
            self._hand_out(number)

    def _hand_out(self, number: int) -> None:
        worker = self._turn % (self.active or self._num_workers)
        self._turn += 1
        self._task_info[number] = (worker,)
        seed = [self.seed_of(number)] if self._is_seeded else []
        self._index_queues[worker].put((number, self._given[number], *seed))

    def _next_data(self) -> Any:
        before = self._rcvd_idx
        try:
            return super()._next_data()
        finally:
            if self._rcvd_idx > before:
                self.indices = self._given.pop(self._rcvd_idx - 1, None)
                self.fetch = self._worker_result_queue.fetches.pop(self._rcvd_idx - 1, None)

    def _try_get_data(self, timeout: float = torchs.CHECK_EVERY_S) -> tuple[bool, Any]:
        until = time.monotonic() + timeout
        while True:
            found, message = super()._try_get_data(max(0.0, until - time.monotonic()))
            if not found or not self._is_dealt_with(*message):
                return found, message

    def _is_dealt_with(self, number: Any, data: Any) -> bool:
        """Whether a message is nothing for torch's loop."""
        if isinstance(data, WorkerGone):
            self._lost(data.channel)
            return True
        if isinstance(number, torchs.ResumeIteration):
            return not self._is_resetting
        info, is_failed = self._task_info.get(number, ()), isinstance(data, torchs.ExceptionWrapper)
        sender = getattr(data, "channel", None) if is_failed else None
        # Of the epoch before, which was left early; or given out twice; or of a worker that was let go, whose batches were.
        if len(info) != 1 or (sender is not None and sender not in self._index_queues):
            return True
        self._losses = 0
        self.answered.add(info[0])
        if number < self._rcvd_idx:  # it was passed over
            del self._task_info[number]
            self._tasks_outstanding -= 1
            return True
        if is_failed and self.active > self.asked > 0:  # it may fail because there are more workers than were asked for
            self._task_info[number] = (self._num_workers,)  # of none that stays
            self._shrink()
            return True
        return False

    def _shrink(self) -> None:
        """Back to as many workers as were asked for: the others end by themselves, and their batches are given out again."""
        self.failed()
        for channel in self._index_queues[self.asked :]:
            channel.hang_up()
        for each in (self._index_queues, self._workers, self._workers_status):
            del each[self.asked :]
        self._num_workers = self.active = self.asked
        self._give_again(self.asked, None)

    def _give_again(self, first: int, end: int | None) -> None:
        """What these workers have not delivered."""
        for number, info in sorted(self._task_info.items()):
            if len(info) == 1 and number in self._given and first <= info[0] < (end or info[0] + 1):
                self._hand_out(number)

    def _lost(self, channel: Channel) -> None:
        number = channel.number
        if channel not in self._index_queues or not self._workers_status[number]:
            return  # it has ended as it should
        process = self._workers[number]
        end_process(process)
        self._losses += 1
        is_last = self._losses >= MOST_LOSSES or not any(each.is_alive() for each in self._workers)
        if is_last or self._has_init_fn or self._dataset_kind == torchs.ITERABLE:
            self._mark_worker_as_unavailable(number)
            raise RuntimeError(_words(process))
        logger.warning("%s Its batches are fetched again.", _words(process))
        if self.active > self.asked > 0:
            self._shrink()
        if channel in self._index_queues:
            channel.close()
            self._index_queues[number], self._workers[number] = self._started(number, self._num_workers)
            if self._is_resetting:
                self._index_queues[number].put(torchs.ResumeIteration(self._shared_seed))
            self._give_again(number, number + 1)

    def poll(self, seconds: float = 0.0) -> None:
        """Receive what has come, the first of it within so many seconds."""
        while self._tasks_outstanding:
            found, message = self._try_get_data(seconds)
            if not found:
                return
            seconds, self._tasks_outstanding = 0.0, self._tasks_outstanding - 1
            self._task_info[message[0]] += (message[1],)

    def pass_over(self) -> Any:
        """The indices of the next batch, which nobody waits for any more: it is dropped when it comes."""
        number, self._rcvd_idx = self._rcvd_idx, self._rcvd_idx + 1
        if len(self._task_info[number]) == 2:
            del self._task_info[number]
        self._worker_result_queue.fetches.pop(number, None)
        self._try_put_index()
        return self._given.pop(number)

    def _shutdown_workers(self, is_exiting: Any = torchs.is_exiting) -> None:  # our own module may be gone by then
        if is_exiting() or os.getpid() != self._process:  # or a fork of the user's
            return
        for channel in getattr(self, "_index_queues", ()):
            channel.hang_up()  # who waits for room to send would never end
        super()._shutdown_workers()
        self._context.close_nursery()


def _words(process: Any) -> str:
    """As torch says it."""
    code = process.exitcode
    if code is not None and code < 0:
        return f"DataLoader worker (pid {process.pid}) is killed by signal: {signal.strsignal(-code)}."
    return (
        f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {code}. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace."
    )
