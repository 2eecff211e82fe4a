"""One pass over an epoch: torch's own iterator with 0 to N workers, whose number may change between two batches.

    next ── the last step is noted ── tuner, if it is time ── job k: a worker has made it, or the loop makes it ── noted
                                          └─ _switch: starts what is missing ── all have begun ── they are given jobs

A job is the indices and the seed of one batch, so that it does not matter who makes it. With no worker at work the loop makes
job k itself; else as many batches are outstanding as workers x depth. Whoever is not needed is parked, and ends after a
while. A lost worker's jobs are given out again; the third loss in a row without a batch in between is DataLoader's error, or,
where nobody asked for workers, the loop goes on alone.

Where the number of workers may change a job goes to whoever has the fewest. While a batch is late the others work ahead of it,
and a worker that is much too late loses its jobs to the others, and then its place. Elsewhere batch k is worker k % workers's.

Where nobody asked for workers the first two make two batches that the loop has made before: only if they are equal do workers
take over. The loop does not wait for them until then.
"""

from __future__ import annotations

import copy
import errno
import logging
import math
import os
import queue
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.births import END_S, Births, end_process, kill
from autotune_loader.autoloader.channel import Channel, Come, WorkerGone
from autotune_loader.autoloader.guard import unguarded_line
from autotune_loader.autoloader.late import AHEAD_FADES, MOST_COPIES, NOTED
from autotune_loader.autoloader.look import NEAR, notes
from autotune_loader.autoloader.pinning import pinner_for
from autotune_loader.autoloader.seeds import QUIET, Seed, Seeds, base_of, mixed, states
from autotune_loader.autoloader.tuner import EpochEnded, Event, Failed, Look, Refused, Room, Switched
from autotune_loader.autoloader.worker import BEGUN, LOOKED, Setup, Threaded
from autotune_loader.diagnosis import Kept
from autotune_loader.pipeline.batches import BatchShape, samples_in
from autotune_loader.pipeline.equal import is_equal
from autotune_loader.pipeline.loop_log import Fetch
from autotune_loader.values import MAIN_PROCESS, LoaderConfig

MOST_LOSSES = 3
"""Workers lost in a row, without a batch in between."""
LOOKS = 2
"""Batches that are made twice before workers take over that nobody asked for."""
SLOW_FETCH_S, COPY_SHARE = 0.2, 0.01
"""A batch that takes the loop so long is kept for them beforehand, if a copy takes no more than a share of that."""
PATIENCE_S, PATIENCE_FETCHES = 10.0, 20.0
FIRST_S, FIRST_FETCHES = 1.0, 3.0
"""A worker that nobody asked for and that takes longer than both for a batch is killed; the same for its first batch."""
BIRTH_S = 60.0
"""Workers that have not begun after this are given up: imports of a fresh process take up to half of it."""
LOGGED = 64
"""Batches after a look, of the loop's own making, whose histories are noted; the others until the next look are counted."""
PARKED_S = 30.0
"""Workers that are not needed for so long end."""
EPOCH = 1 << 40
"""A job's number is that of its batch, and so many more for each epoch: a late batch of an earlier one is not taken for it."""
QUEUED = (0,)
"""Of a job that waits for a worker: torch takes this for one that is alive."""
LOOP = -1
"""The worker of a job that the loop makes in place of workers that were lost."""
FEWEST_JOBS = 2
"""That a worker has, so that it need not wait for the loop; more may wait with it while no batch is late."""
STUCK_S = 0.1
"""How long whoever may be stuck is waited for at the end, before it is killed."""
CHECK_S, LEAST_WAIT_S = 0.5, 0.001
"""How often workers are looked at whose channels may have no end; no batch is late sooner than the second, epoll's step."""
TOO_MANY_FILES = (
    "Too many open files. Communication with the workers is no longer possible. Please increase the limit using `ulimit -n` "
    "in the shell"
)
MAIN_THREAD = threading.main_thread().ident

log = logging.getLogger("autotune_loader.autoloader")


class View:
    """A loader with other attributes; `watched_as` is the loader as which its iterator is watched."""

    def __init__(self, loader: Any, **other: Any) -> None:
        vars(self).update(vars(loader), **other, loader=loader, watched_as=loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)


class _Drawn:
    """A sampler whose iterator was asked for already."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Any:
        return self._iterator


class _HeadIsOurs(Exception):  # noqa: N818 - no error
    """The next batch is the loop's to make: its worker is lost."""


class ElasticIter(torchs.WorkersIter):  # type: ignore[misc]
    """The iterator of one loader. Of several, the one that was begun last tunes.

    Attributes:
        indices, fetch: Of the batch that was delivered last, and how it was made.
    """

    indices: Any = None
    fetch: Fetch | None = None
    _shutdown = True
    _send_idx: int
    _rcvd_idx: int
    _tasks_outstanding: int
    _workers: list[Any]
    _index_queues: list[Channel]
    _workers_status: list[bool]
    _index_sampler: Any
    _dataset: Any
    _ready: set[Channel]
    """Workers that are ready for a job."""
    _answered: set[Channel]
    """Workers that have delivered a batch."""
    _ending: list[Any]
    """Processes that were let go."""
    _stuck: list[Any]
    """Those among them that may not end by themselves."""
    _suspects: dict[Channel, float]
    """Workers that are much too late, and since when: they get no jobs until they answer."""
    _queued: deque[int]
    """Batches that are drawn, and wait for a worker, in order."""
    _given: dict[int, Any]
    """Indices by number of the batch, until it is delivered."""
    _come: dict[int, Come]
    """Batches that have come, until they are delivered."""
    _looks: dict[int, Any]
    """What the loop has made of jobs that workers make again."""
    _latest: deque[tuple[int, Any, Any]]
    """What workers may make again: number, indices, and what the loop has made of them."""
    _retried: set[int]
    """Jobs that failed in a worker beyond those that were asked for."""
    _error: Exception | None
    """Of the sampler, for the batch that it belongs to."""

    def __init__(self, loader: Any, live: Any) -> None:
        begun = time.monotonic()
        self._process, self._live, self._tuner, self._log = os.getpid(), live, live.tuner, live.found.log
        self._asked = live.tuner.asked.num_workers
        self._is_fixed = live.has_init_fn or loader._dataset_kind == torchs.ITERABLE
        self._loop = self._log.begin(begun)
        config = self._tuner.wanted
        self._config = self._wanted = self._tuner.asked
        live.walk(loader)
        self._active, self._depth = self._config.num_workers, self._config.prefetch_factor or 1
        self._losses, self._epochs, self._seed = 0, -1, 0
        self._ready, self._answered, self._ending = set(), set(), []
        self._stuck, self._suspects, self._queued, self._copies, self._tended = [], {}, deque(), 1, -1
        self._may_share = live.is_seeded and not self._is_fixed
        self._switched_at = self._awaited_at = self._looks_sent_at = self._births_s = 0.0
        self._look_batch, self._is_known = 0, False
        self._parked_until = math.inf
        self._given, self._come, self._looks, self._retried = {}, {}, {}, set()
        self._error = None
        self._copy_s, self._draws, self._check_at = 0.0, 0, 0.0
        self._latest = deque(maxlen=LOOKS)
        with torchs.without_handler():
            super().__init__(self._view_of(loader, config))
        self._context.started()
        torchs.forget_processes(self)
        self._profile_name = f"enumerate(DataLoader)#{torchs.WorkersIter.__name__}.__next__"
        self._dataset = loader.dataset
        if not self._asked:
            self._leave_torchs_worker_out(loader)
            self._prepare(config)
        live.tell(self._config, self._context.method)
        self._births_s += self._context.start_s * self._active
        self._loop.started(time.monotonic())
        self._begin_with(config)

    def _view_of(self, loader: Any, config: LoaderConfig) -> View:
        """The loader, as torch's own iterator is to see it."""
        live, how = self._live, self._live.how
        real: Any = loader.multiprocessing_context or torch.multiprocessing
        pinner = pinner_for(loader) if loader.pin_memory else None
        pins = loader.pin_memory and torch.accelerator.is_available()
        other: dict[str, Any] = {"num_workers": max(1, self._active), "prefetch_factor": self._depth}
        if not self._asked:
            real = torch.multiprocessing.get_context(live.method)
            other |= {"timeout": 0, "persistent_workers": bool(how.get("persistent_workers"))}
        if pinner is not None or (pins and not self._asked):
            other |= {"pin_memory": False, "pin_memory_device": ""}  # torch's thread has nothing to do
        self._pins = pins and not self._asked
        has_nursery = live.tuner.refused is None and not self._is_fixed
        is_asked, pins = self._asked > 0, pinner is not None or self._pins
        setup = Setup(live.is_seeded, None if is_asked else torch.initial_seed(), self._asked, {})
        self._context = Births(
            real,
            setup,
            live.held,
            pinner,
            live.home,
            pins=pins,
            has_nursery=has_nursery,
            nursery_first=is_asked and (loader.persistent_workers or self._needs_nursery(config)),
        )
        if live.fetch_threads is not None:
            other["dataset"] = other["worker_init_fn"] = Threaded(
                loader.dataset, live.fetch_threads, loader.worker_init_fn
            )
        return View(loader, multiprocessing_context=self._context, **other)

    def _leave_torchs_worker_out(self, loader: Any) -> None:
        """Torch's iterator begins with one worker at least, which is nobody where none was asked for."""
        for each in (self._workers, self._index_queues, self._workers_status):
            each.clear()
        self._num_workers = 0
        collate, drop_last = self._collate_fn, self._drop_last
        fetcher = torchs.fetcher(self._dataset_kind, loader.dataset, self._auto_collation, collate, drop_last)
        self._fetch = fetcher.fetch
        self._seeds = Seeds(torch.initial_seed(), self._live.held) if self._live.draws else None

    def _needs_nursery(self, config: LoaderConfig) -> bool:
        """Whether further workers may be started in this epoch."""
        return bool(config.num_workers > self._asked or self._tuner.may_start())

    def _prepare(self, config: LoaderConfig) -> None:
        """Fork a nursery before the first fetch where workers may be started in this epoch."""
        if self._context.method == "fork" and not self._context.is_prepared and self._needs_nursery(config):
            begun = time.monotonic()
            self._context.prepare(self._live.files)
            took_s = time.monotonic() - begun
            self._tuner.own_s += took_s
            self._births_s += took_s

    # --- an epoch ---

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        begun = time.monotonic()
        if not first_iter:
            self._loop = self._log.begin(begun)
        self._epochs += 1
        for each in (self._given, self._come, self._looks, self._retried, self._latest, self._queued):
            each.clear()
        self._ahead, self._draws = 0.0, self._draws if self._draws >= QUIET else 0
        if self._dataset_kind == torchs.ITERABLE:
            super()._reset(loader, first_iter)
            if not first_iter:
                self._loop.started(time.monotonic())
            return
        self._error = None
        sampler, workers = self._index_sampler, self._num_workers
        if not self._asked:  # torch asks a sampler twice where there are workers
            self._index_sampler = _Drawn(self._sampler_iter if first_iter else iter(sampler))
        # Workers that are kept need not be told: late batches are known by their numbers.
        self._num_workers = 0
        super()._reset(loader, first_iter)
        self._index_sampler, self._num_workers = sampler, workers
        self._workers_status = [True] * workers
        self._workers_num_tasks: Any = defaultdict(int)  # torch counts for `in_order=False` alone
        if not self._asked and not first_iter:
            self._live.walk(loader)
            self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        # Torch draws a seed once for workers that are kept.
        is_first = not (self._asked and self._epochs)
        self._seed = self._base_seed if is_first else mixed(self._base_seed, self._epochs) >> 1
        self._held_seed = base_of(self._live.held)
        if first_iter:
            self._try_put_index()
            return
        config = self._tuner.wanted
        if not self._asked:
            self._prepare(config)
        self._try_put_index()
        self._loop.started(time.monotonic())
        self._begin_with(config)

    def _begin_with(self, config: LoaderConfig) -> None:
        if config == self._config:
            self._decide(Switched(config, 0, self._context.start_s))
            return
        self._switch(config)
        if self._is_proven and self._context.method == "fork":  # they take part from the first batch on
            self._ready.update(self._index_queues)
            if self._asked:
                self._advance()

    def may_begin_again(self, live: Any) -> bool:
        """Whether its workers may make another epoch of this loader, as torch's persistent ones do, also after a `break`."""
        return self._live is live and not self._shutdown and self._process == os.getpid()

    def __next__(self) -> Any:
        now, loop, tuner = time.monotonic(), self._loop, self._tuner
        if self._is_known and now < tuner.wake and tuner.wanted is self._wanted and loop.may_skip(now):
            batch = self._next_of_torch(now)
            loop.skip(now, time.monotonic(), self._samples(batch))
            return batch
        self._is_known = False
        loop.ask(now)
        if now >= self._parked_until:
            self._end_parked()
        if self._log.current is loop:
            if now >= tuner.wake:
                self._look(now)
            if tuner.wanted is not self._wanted:  # such as after `freeze()`
                self._switch(tuner.wanted)
        batch = self._next_of_torch(None)
        loop.receive(time.monotonic(), self._samples(batch), self.fetch)
        if not (self._active or self._asked or self._wanted is not self._config):
            self._is_known = self._log.end >= self._look_batch + LOGGED and not tuner.is_trying
        return batch

    def _next_of_torch(self, unnoted: float | None) -> Any:
        try:
            if unnoted is None or torchs.is_profiling():
                return super().__next__()
            # As torch's own, but for the mark that a profile has of it: 6 us.
            batch = self._next_data()
            self._num_yielded += 1
            return batch
        except StopIteration:
            if unnoted is not None:
                self._loop.ask(unnoted)
            self._end()
            raise

    def _samples(self, batch: Any) -> int:
        if self._auto_collation and self.indices is not None:
            try:
                return len(self.indices)
            except TypeError:
                pass
        try:
            return samples_in(batch) or 1 if self._auto_collation else 1
        except Exception:  # of somebody's own class
            return 1

    def _end(self) -> None:
        loop = self._loop
        if not loop.is_over:
            loop.end(now := time.monotonic())
            if self._log.current is loop:
                batches, start_s = self._num_yielded, self._births_s / max(1, len(self._workers))
                self._births_s = 0.0
                self._log.marks.note(
                    now, lambda end: self._tuner.decide(EpochEnded(batches, end - loop.begun, start_s), end)
                )

    # --- what runs ---

    def _look(self, now: float) -> None:
        """Whatever goes wrong here, the epoch goes on; what it takes is tuning's own time."""
        tuner, best, self._look_batch = self._tuner, self._tuner.best, self._log.end
        try:
            self._decide(Look(self._room))
        except Exception as error:
            log.warning("AutoLoader no longer tunes this loader", exc_info=True)
            self._decide(Refused(Kept.NOT_TUNED(error=f"{type(error).__name__}: {error}")))
        if tuner.best != best and self._live.on_change is not None:
            try:
                self._live.on_change(self._live.found)
            except Exception:  # of somebody's logger
                log.warning("on_change=%r raised", self._live.on_change, exc_info=True)
        tuner.own_s += time.monotonic() - now

    def _room(self) -> Room:
        room: Room = self._live.room([each.pid for each in self._workers])
        return room

    def _decide(self, event: Event) -> None:
        """Tell the tuner what has happened, and have run what it wants."""
        config = self._tuner.decide(event, time.monotonic())
        if config is not self._wanted:
            self._switch(config)

    def _switch(self, config: LoaderConfig) -> None:
        """Have this run: what is missing is started, and given jobs as soon as it has begun. Nothing else changes what runs."""
        if config is not self._wanted:
            self._wanted, self._switched_at = config, time.monotonic()
        if self._tuner.refused is not None and not self._asked:
            self._looks.clear()
            self._context.close_nursery()
        if self._shutdown or self._is_fixed:
            return
        if config.num_workers > len(self._workers):
            self._start(config.num_workers)
        self._advance()

    def _start(self, workers: int) -> None:
        """Have so many workers, as soon as there is a nursery."""
        context, method = self._context, self._context.method
        is_new = not self._asked and method != "fork"
        if is_new and not context.is_begun and unguarded_line() is not None:
            self._decide(Refused(Kept.NO_GUARD(method=method)))
            return
        begun = time.monotonic()
        try:
            if is_new:
                context.prepare(batch=self._rcvd_idx)
            if not context.is_prepared:
                return
            for number in range(len(self._workers), workers):
                channel, process = self._context.start(number, workers)
                self._index_queues.append(channel)
                self._workers.append(process)
                self._workers_status.append(True)
                self._num_workers += 1
        except OSError as error:  # no memory, too many processes or files: later there may be
            log.debug("no further worker can be started: %s", error)
            self._decide(Failed())
        except Exception as error:  # what workers get cannot be pickled
            self._decide(Refused(Kept.NOT_BEGUN(method=method, error=f"{type(error).__name__}: {error}")))
        self._births_s += time.monotonic() - begun

    def _advance(self) -> None:
        """What is wanted runs from now on, if all of it has begun and may take over."""
        config, workers, live = self._wanted, self._wanted.num_workers, self._live
        if config == self._config or self._shutdown:
            self._config = config
            return
        self._have_made_again()
        is_more = workers > self._active
        late = [each for each in self._index_queues[:workers] if is_more and each not in self._ready]
        if late or len(self._workers) < workers or (workers and not self._is_proven):
            if late and time.monotonic() > self._switched_at + BIRTH_S:
                self._cut(min(each.number for each in late))
                self._decide(Failed())
            elif self._looks and time.monotonic() > self._looks_sent_at + max(
                PATIENCE_S, PATIENCE_FETCHES * live.slowest_s
            ):
                self._leave_to_the_loop(Kept.WORKERS_LOST(error="they make no batch"))
            return
        in_flight = self._send_idx - self._rcvd_idx - len(self._queued)
        self._config, self._active, self._depth, self._ahead = config, workers, config.prefetch_factor or 1, 0.0
        self._parked_until = time.monotonic() + PARKED_S if len(self._workers) > workers else math.inf
        self._live.tell(config, self._context.method)
        self._decide(Switched(config, in_flight, self._context.start_s))
        self._try_put_index()

    @property
    def _is_looking(self) -> bool:
        """Whether workers that nobody asked for wait for batches to make again."""
        if self._wanted is self._config or self._is_proven or not self._workers:
            return False
        return all(each in self._ready for each in self._index_queues)

    @property
    def _is_proven(self) -> bool:
        return bool(self._asked or self._live.equal >= LOOKS)

    def _cut(self, workers: int) -> None:
        """Keep so many: the others end by themselves, and their jobs are given out again."""
        self._active = min(self._active, workers)
        self._ending = [each for each in self._ending if each.is_alive()]
        gone = self._index_queues[workers:]
        for channel, process in zip(gone, self._workers[workers:], strict=True):
            self._ready.discard(channel)
            is_stuck = self._suspects.pop(channel, None) is not None
            (self._stuck if is_stuck else self._ending).append(process)
            channel.hang_up()
        for each in (self._index_queues, self._workers, self._workers_status):
            del each[workers:]
        self._num_workers = workers
        self._give_again(gone)

    def _end_parked(self) -> None:
        self._parked_until = math.inf
        self._cut(max(self._active, self._wanted.num_workers))

    # --- jobs ---

    def _seed_of(self, number: int) -> Seed:
        return mixed(self._seed, number), mixed(self._held_seed, number) if self._live.held else 0

    def _try_put_index(self) -> None:
        if self._dataset_kind == torchs.ITERABLE:
            super()._try_put_index()
            return
        usual = self._active * self._depth
        most = usual + (int(self._ahead) if self._ahead and self._shares else 0)
        while self._active and (outstanding := self._send_idx - self._rcvd_idx) < most:
            if (outstanding >= usual and not self._may_draw_ahead) or not self._draw():
                break
        self._hand_out()

    def _draw(self) -> bool:
        """Queue the next batch, if there is one."""
        if self._error is not None:
            return False
        try:
            indices = self._drawn()
        except StopIteration:
            return False
        except Exception as error:  # of the sampler: it is raised at the batch that it belongs to
            self._error = error
            return False
        number, self._send_idx = self._send_idx, self._send_idx + 1
        self._tasks_outstanding += 1
        self._given[number] = indices
        if number or self._asked:
            self._task_info[number] = QUEUED
            self._queued.append(number)
        else:
            self._task_info[number] = (LOOP,)
        return True

    @property
    def _shares(self) -> bool:
        """Whether any worker may make any batch: their number may change, and the data have not asked for it."""
        return bool(self._answered) and self._may_share and self._tuner.may_change

    def _hand_out(self) -> None:
        """Give what is queued to whoever has the fewest jobs, or in turns; to the loop if no worker is at work."""
        queued = self._queued
        if not queued:
            return
        workers, shares = self._active or (len(self._workers) if self._asked else 0), self._shares
        most = FEWEST_JOBS if self._ahead >= 1 else max(FEWEST_JOBS, self._depth)
        while queued:
            number = queued[0]
            if number not in self._come and number in self._task_info:
                worker = number % workers if workers else LOOP
                if shares and workers:
                    channel = self._freest(workers)
                    if channel is None or (len(channel.jobs) >= most and number != self._rcvd_idx):
                        return
                    worker = channel.number
                self._give(number, worker)
            queued.popleft()

    def _freest(self, workers: int) -> Channel | None:
        """Who of so many has the fewest jobs; one that has begun, if there is one."""
        found, fewest, suspects = None, EPOCH, self._suspects
        for channel in self._index_queues[:workers]:
            jobs = len(channel.jobs)
            if jobs < fewest and channel not in suspects and channel in self._ready:
                found, fewest = channel, jobs
        if found is None:
            return next((each for each in self._index_queues[:workers] if each not in suspects), None)
        return found

    def _give(self, number: int, worker: int) -> None:
        self._task_info[number] = (worker,)
        if worker != LOOP:
            self._send(number, self._given[number], worker)

    def _send(self, number: int, indices: Any, worker: int) -> None:
        seed = [self._seed_of(number)] if self._live.is_seeded else []
        channel, job = self._index_queues[worker], number + self._epochs * EPOCH
        channel.put((job, indices, *seed))
        channel.jobs.append(job)

    def _is_awaited(self, job: int) -> bool:
        """Whether a job that was sent is one of this epoch that nobody has done."""
        epoch, number = divmod(job, EPOCH)
        return (
            epoch == self._epochs and number in self._task_info and number in self._given and number not in self._come
        )

    def _give_again(self, channels: Sequence[Channel]) -> None:
        """Jobs of these workers that are not done, and that nobody else is at."""
        others = [each for each in self._index_queues if each not in channels and each not in self._suspects]
        held = {job: each.number for each in others for job in each.jobs}
        jobs = {job for each in channels for job in each.jobs if self._is_awaited(job)}
        for job in jobs.intersection(held):
            self._task_info[job % EPOCH] = (held[job],)
        numbers = {job % EPOCH for job in jobs.difference(held)}
        for number in numbers:
            self._task_info[number] = QUEUED
        self._queued = deque(sorted(numbers.union(self._queued)))
        self._hand_out()

    # --- late batches ---

    def _tend(self, now: float) -> float:
        """While the next batch is waited for: draw further ones if it is late, give it to another worker if it is too late.

        Returns:
            Seconds until it is to be looked at again.
        """
        waited_s, until_s, shares = now - self._awaited_at, math.inf, self._shares
        if shares and self._tasks_outstanding <= self._active and self._live.pace.usual_s and self._may_draw_ahead:
            until_s = max(self._live.pace.usual_s / 2, LEAST_WAIT_S) - waited_s
            if until_s <= 0:
                self._draw_ahead(now)
                until_s = math.inf
        if shares and (channel := self._at_head()) is not None:
            # Whoever has not begun with it is late with another one.
            is_copy = channel.jobs[0] % EPOCH == self._rcvd_idx
            limit_s = self._live.pace.limit_s(self._copies if is_copy else 1)
            if waited_s >= limit_s and (self._copies < MOST_COPIES or not is_copy):
                self._copies += is_copy
                self._suspect(channel, now)
                return LEAST_WAIT_S
            until_s = min(until_s, limit_s - waited_s) if waited_s < limit_s else until_s
        if self._suspects:
            self._replace_suspects(now)
            until_s = min(until_s, CHECK_S / 2)
        return max(until_s, LEAST_WAIT_S)

    def _at_head(self) -> Channel | None:
        """Whose next batch is, of all that have it the latest; None where it has come, or waits for a worker."""
        info = self._task_info.get(self._rcvd_idx, ())
        if len(info) != 1 or info[0] == LOOP or (self._queued and self._queued[0] == self._rcvd_idx):
            return None
        channel = self._index_queues[info[0]]
        return channel if channel.jobs else None

    @property
    def _may_draw_ahead(self) -> bool:
        return self._send_idx < self._live.drawn_until or self._draws >= QUIET

    def _draw_ahead(self, now: float) -> None:
        """As many batches are with workers again as usual."""
        usual = self._active * self._depth
        most = usual + self._live.most_ahead(now)
        while self._tasks_outstanding < usual and self._send_idx - self._rcvd_idx < most and self._may_draw_ahead:
            if not self._draw():
                break
        self._ahead = max(self._ahead, float(self._send_idx - self._rcvd_idx - usual))
        self._hand_out()

    def _suspect(self, channel: Channel, now: float) -> None:
        """Its jobs are given to others, too; whoever answers first is believed."""
        log.debug(
            "batch %d takes longer than %.1f s: another worker makes it, too", self._rcvd_idx, now - self._awaited_at
        )
        self._suspects.setdefault(channel, now)
        self._awaited_at = now
        self._give_again([channel])

    def _replace_suspects(self, now: float) -> None:
        """Those that are still at what nobody needs, and the first one where no other worker is left."""
        limit_s, active = 2 * self._live.pace.limit_s(), self._index_queues[: self._active]
        may_be_needed = self._copies < MOST_COPIES and all(each in self._suspects for each in active)
        for channel, since in list(self._suspects.items()):
            is_needed = bool(channel.jobs) and self._is_awaited(channel.jobs[0])
            if now - since < limit_s or channel not in self._ready or (is_needed and not may_be_needed):
                continue
            self._replace(channel, now)
            if is_needed:
                self._awaited_at, may_be_needed = now, False

    def _replace(self, channel: Channel, now: float) -> None:
        """It is hung up on, and ends when it is done; another one begins in its place."""
        number, pace = channel.number, self._live.pace
        if channel not in self._answered:  # whoever follows may take as long for its first batch
            pace.slowest_s = max(pace.slowest_s, now - self._suspects[channel])
        log.debug("worker %d is replaced: it has not answered for too long", number)
        try:
            born = self._context.start(number, len(self._workers))
        except Exception as error:  # later there may be memory, or a nursery
            log.debug("no worker can take its place: %s", error)
            self._suspects[channel] = now
            return
        del self._suspects[channel]
        self._ready.discard(channel)
        channel.hang_up()
        self._stuck = [each for each in self._stuck if each.is_alive()] + [self._workers[number]]
        self._index_queues[number], self._workers[number] = born
        self._give_again([channel])

    # --- the next batch ---

    def _next_data(self) -> Any:
        is_more = self._ahead >= 1 and self._tasks_outstanding > self._active * self._depth
        if self._queued or is_more or self._suspects or (self._wanted is not self._config and not self._asked):
            self._receive()
            if self._suspects:
                self._replace_suspects(time.monotonic())
        number = self._rcvd_idx
        if number < self._send_idx and self._task_info[number] == (LOOP,):
            del self._task_info[number]
            self._rcvd_idx, self._tasks_outstanding = number + 1, self._tasks_outstanding - 1
            self._try_put_index()
            return self._made(number, self._given.pop(number))
        if number == self._send_idx and self._dataset_kind != torchs.ITERABLE:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._try_put_index()
        if number < self._send_idx or self._active or self._is_fixed:
            self._awaited_at, self._copies = time.monotonic(), 1
            try:
                return super()._next_data()
            except _HeadIsOurs:
                return self._next_data()
        try:
            indices = self._drawn()
        except StopIteration:
            return super()._next_data()  # which ends the epoch
        self._send_idx = self._rcvd_idx = number + 1
        return self._made(number, indices)

    def _drawn(self) -> Any:
        """The next indices. A sampler that draws them from a global generator is not drawn ahead of the loop."""
        if self._draws >= QUIET or self._live.is_torchs_sampler:
            return self._next_index()
        before, draws = states(), self._draws
        indices = self._next_index()
        if states() == before:
            self._draws += 1
            return indices
        self._draws = 1
        if draws and self._tuner.refused is None:  # the first one may shuffle
            self._decide(Refused(Kept.SAMPLER_DRAWS()))
        return indices

    def _made(self, number: int, indices: Any) -> Any:
        """Batch `number`, which the loop makes."""
        self.indices = indices
        if self._is_known:
            return self._fetched(number, indices)
        may_look = not self._is_proven and self._tuner.refused is None
        before = (
            notes(self._live.objects)
            if may_look and (self._is_looking or self._live.slowest_s > SLOW_FETCH_S)
            else None
        )
        begun, cpu = time.monotonic(), time.thread_time()
        batch = self._fetched(number, indices)
        end = time.monotonic()
        self.fetch = MAIN_PROCESS, begun, end, end, time.thread_time() - cpu
        self._live.slowest_s = max(self._live.slowest_s, end - begun)
        if not self._live.batch_bytes:  # before workers tell: how deep their queues may be
            self._live.batch_bytes = 1
            with suppress(Exception):  # of somebody's own class
                self._live.batch_bytes = max(1, BatchShape.of(batch).bytes)
        if before is not None and (after := notes(self._live.objects)) != before:
            what = next(name for name in after if after[name] != before.get(name))
            self._decide(Refused(Kept.DATASET_CHANGES(what=what)))
        if may_look:
            self._keep(number, indices, batch, end - begun)
        return batch

    def _fetched(self, number: int, indices: Any) -> Any:
        # In another thread than the main one the training may draw meanwhile.
        if self._seeds is None or threading.get_ident() != MAIN_THREAD:
            batch = self._fetch(indices)
        else:
            batch = self._seeds.around(self._fetch, indices, lambda: self._seed_of(number))
        return torchs.pin(batch) if self._pins else batch

    # --- what workers are told, and tell ---

    def _keep(self, number: int, indices: Any, batch: Any, fetch_s: float) -> None:
        """Keep what the loop has made, for workers to make it again: from now on, and the latest where a copy costs little."""
        is_little = fetch_s > SLOW_FETCH_S and self._copy_s < COPY_SHARE * fetch_s
        if not (is_little or self._is_looking):
            return
        begun = time.monotonic()
        try:
            self._latest.append((number, indices, copy.deepcopy(batch)))
        except Exception as error:  # of somebody's own class
            self._decide(Refused(Kept.NOT_COMPARED(error=f"{type(error).__name__}: {error}")))
        self._copy_s = time.monotonic() - begun
        self._tuner.own_s += self._copy_s
        self._have_made_again()

    def _have_made_again(self) -> None:
        """Workers make what the loop has made: two processes that make one sample at once may spoil a cache."""
        while self._latest and self._is_looking and len(self._looks) + self._live.equal < LOOKS:
            number, indices, self._looks[number] = self._latest.popleft()
            self._looks_sent_at = time.monotonic()
            try:
                self._send(number, indices, len(self._looks) % len(self._workers))
            except Exception as error:  # indices that cannot be pickled
                self._decide(
                    Refused(Kept.NOT_BEGUN(method=self._context.method, error=f"{type(error).__name__}: {error}"))
                )

    def _receive(self) -> None:
        """What has come; the loop waits for nothing."""
        results, own = self._context.results, self._data_queue
        while results.is_ready() if own is results else not own.empty():
            found, message = self._try_get_data(0.0)
            if not found:
                break
            self._tasks_outstanding -= 1
            self._task_info[message[0]] += (message[1],)
        if self._wanted is not self._config and not self._asked:
            self._switch(self._wanted)

    def _try_get_data(self, timeout: float = torchs.CHECK_EVERY_S) -> tuple[bool, Any]:
        until = time.monotonic() + timeout
        while True:
            if timeout and self._task_info.get(self._rcvd_idx) == (LOOP,):
                raise _HeadIsOurs
            left_s = max(0.0, until - (now := time.monotonic()))
            if timeout and (self._suspects or self._tended == self._rcvd_idx):
                left_s = min(left_s, self._tend(now))
            elif timeout:  # it has just been asked for
                self._tended = self._rcvd_idx
                left_s = min(left_s, max(self._live.pace.usual_s / 2, LEAST_WAIT_S))
            found, message = self._taken(left_s if self._asked else min(left_s, FIRST_S / 2))
            if found:
                is_for_torch = self._is_for_torch(message[1])
                if self._queued:
                    self._hand_out()
                if is_for_torch:
                    return True, (message[0] % EPOCH if type(message[0]) is int else message[0], message[1].data)
            elif not self._asked and timeout:
                self._lose_patience()
            if not found and (time.monotonic() >= until):
                return found, message

    def _taken(self, timeout: float) -> tuple[bool, Any]:
        """What torch takes from its queue; a worker that it would find dead is lost here, too."""
        if self._is_fixed:
            found: tuple[bool, Any] = super()._try_get_data(timeout)
            return found
        try:
            return True, self._data_queue.get(timeout=timeout)
        except queue.Empty:
            pass
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise RuntimeError(TOO_MANY_FILES) from error
        if timeout and (now := time.monotonic()) >= self._check_at:
            self._check_at = now + CHECK_S
            workers = zip(self._index_queues, self._workers, strict=True)
            for channel in [channel for channel, process in workers if not process.is_alive()]:
                self._context.results.remove(channel)
                self._lost(channel)
        return False, None

    def _is_for_torch(self, come: Come) -> bool:
        """Whether a message is a batch that torch's own code waits for."""
        if isinstance(come.data, WorkerGone):
            self._lost(come.channel)
            return False
        if self._suspects:
            self._suspects.pop(come.channel, None)
        jobs = come.channel.jobs
        if jobs and jobs[0] == come.number:
            jobs.popleft()
        elif come.number in jobs:
            jobs.remove(come.number)
        if come.note == LOOKED:
            self._decide(Refused(Kept.WORKER_INFO()))
        if come.note == BEGUN:
            self._ready.add(come.channel)
            self._advance()
            return False
        if come.bytes > self._live.batch_bytes:
            self._live.batch_bytes = come.bytes
        if self._dataset_kind == torchs.ITERABLE:
            self._come[come.number] = come
            return True
        epoch, number = divmod(come.number, EPOCH)
        if epoch != self._epochs:  # left early
            return False
        info, is_failed = self._task_info.get(number, ()), isinstance(come.data, torchs.ExceptionWrapper)
        is_look = number in self._looks
        if not is_look and (len(info) != 1 or (is_failed and not self._is_last_copy(come, info[0]))):  # given out again
            return False
        if come.fetch is not None:
            live, fetch_s = self._live, come.fetch[2] - come.fetch[1]
            if fetch_s > live.slowest_s:
                live.slowest_s = fetch_s
            if fetch_s > live.pace.slowest_s or not number % NOTED:
                live.pace.note(fetch_s)
        if is_look:
            self._compare(number, come.data)
            return False
        self._answered.add(come.channel)
        if is_failed and 0 < self._asked <= come.channel.number and number not in self._retried:
            self._retried.add(number)  # it may fail because more workers run than were asked for
            self._give(number, number % self._asked)
            return False
        if number in self._retried and not is_failed:
            self._decide(Failed())
        self._come[number] = come
        return True

    def _is_last_copy(self, come: Come, latest: int) -> bool:
        """Whether nobody else makes the batch that has failed here, or was given it before."""
        if come.channel not in self._index_queues or come.number % EPOCH in self._queued:
            return False
        others = [each for each in self._index_queues if each is not come.channel]
        return come.channel.number == latest or not any(come.number in each.jobs for each in others)

    def _process_data(self, data: Any, *worker: Any) -> Any:
        """Deliver the batch before the next one that is awaited."""
        number = self._rcvd_idx - 1
        self.indices, come = self._given.pop(number, None), self._come.pop(number, None)
        if come is not None:
            self.fetch, self._losses = come.fetch, 0
        if self._ahead:
            most = self._live.most_ahead(time.monotonic())
            self._ahead = max(0.0, min(self._ahead - AHEAD_FADES, most))
        if isinstance(data, torchs.ExceptionWrapper) and not self._asked:
            self._try_put_index()
            return self._made(number, self.indices)  # raises what is the data's own
        return super()._process_data(data, *worker)

    def _compare(self, number: int, theirs: Any) -> None:
        """What a worker has made of a job that the loop has made."""
        own, why = self._looks.pop(number), None
        if isinstance(theirs, torchs.ExceptionWrapper):
            # Notes of the exception come after its line (Python 3.14 adds where something cannot be pickled).
            lines, name = str(theirs.exc_msg).strip().splitlines(), theirs.exc_type.__name__
            why = Kept.WORKER_ERROR(error=next((each for each in reversed(lines) if name in each), lines[-1]))
        else:
            try:
                why = None if is_equal(own, theirs, NEAR) else Kept.SAMPLES_DIFFER(batch=number)
            except Exception as error:  # of somebody's own class
                why = Kept.NOT_COMPARED(error=f"{type(error).__name__}: {error}")
        if why is not None:
            self._decide(Refused(why))
            return
        self._live.equal += 1
        self._advance()

    def _lost(self, channel: Channel) -> None:
        number = channel.number
        if channel not in self._index_queues or not self._workers_status[number] or self._shutdown:
            return  # it has ended as it should
        process = self._workers[number]
        end_process(process)
        self._ready.discard(channel)
        self._suspects.pop(channel, None)
        self._losses += 1
        if self._is_fixed or (self._losses >= MOST_LOSSES and self._asked):
            self._mark_worker_as_unavailable(number)
            raise RuntimeError(_words(process))
        if self._losses >= MOST_LOSSES or (self._is_proven and not self._asked and channel not in self._answered):
            self._leave_to_the_loop(Kept.WORKERS_LOST(error=_words(process)))
            return
        log.log(
            logging.WARNING if self._active else logging.DEBUG, "%s Its batches are fetched again.", _words(process)
        )
        channel.close()
        try:
            self._index_queues[number], self._workers[number] = self._born_again(number, process)
        except Exception:  # the nursery is gone, too; or no process can be started
            if not self._asked:
                self._leave_to_the_loop(Kept.WORKERS_LOST(error=_words(process)))
                return
            raise
        self._looks.clear()
        self._give_again([channel])
        if len(self._workers) > self._asked > 0:
            self._decide(Failed())
            self._cut(max(self._asked, self._wanted.num_workers))

    def _born_again(self, number: int, lost: Any) -> tuple[Channel, Any]:
        """In the place of a lost worker; the one that is being started may be lost, too."""
        while True:
            try:
                return self._context.start(number, len(self._workers))
            except ConnectionError as error:
                self._losses += 1
                if self._losses >= MOST_LOSSES:
                    raise RuntimeError(_words(lost)) from error

    def _leave_to_the_loop(self, why: Any) -> None:
        """Workers that nobody asked for are gone for now, or for good where they never made a batch."""
        self._cut(0)
        self._looks.clear()
        self._losses = 0
        self._decide(Failed() if self._is_proven else Refused(why))

    def _lose_patience(self) -> None:
        """The worker of the next batch takes too long, as one does that was forked while another thread held a lock."""
        if (channel := self._at_head()) is None:
            return
        has_answered = channel in self._answered or self._copies > 1
        least_s, fetches = (PATIENCE_S, PATIENCE_FETCHES) if has_answered else (FIRST_S, FIRST_FETCHES)
        patience_s = float(self._live.how.get("timeout") or max(least_s, fetches * self._live.slowest_s))
        if time.monotonic() > self._awaited_at + patience_s:
            self._awaited_at = time.monotonic()
            kill(self._workers[channel.number])

    def _shutdown_workers(self, is_exiting: Any = torchs.is_exiting) -> None:  # our own module may be gone by then
        if is_exiting() or self._shutdown or os.getpid() != self._process:  # or a fork of the user's
            return
        begun = time.monotonic()
        for channel in self._index_queues:
            channel.hang_up()  # who waits for room to send would never end
        if not self._asked:
            for channel, process in zip(self._index_queues, self._workers, strict=True):
                if channel not in self._ready or self._looks:  # nobody waits for it
                    kill(process)
        workers = list(self._workers)
        for number, channel in reversed(list(enumerate(self._index_queues))):
            job = channel.jobs[0] if channel.jobs else -1
            # Another one has made what it is at; or it may be stuck.
            if channel in self._suspects or (job >= self._epochs * EPOCH and not self._is_awaited(job)):
                self._stuck.append(self._workers[number])
                for each in (self._index_queues, self._workers, self._workers_status):
                    del each[number]
        self._suspects.clear()
        super()._shutdown_workers()
        self._workers = workers
        for process in self._stuck:
            process.join(STUCK_S)
            if process.exitcode is None:
                kill(process)
        for process in self._stuck:
            process.join(END_S)  # and no longer: what waits for a disk cannot be killed
        self._stuck.clear()
        for process in self._ending:
            end_process(process)
        self._ending.clear()
        self._context.close_nursery()
        self._births_s += time.monotonic() - begun


def _words(process: Any) -> str:
    """As torch says it."""
    code = process.exitcode
    if code is not None and code < 0:
        return f"DataLoader worker (pid {process.pid}) is killed by signal: {signal.strsignal(-code)}."
    return (
        f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {code}. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace."
    )
