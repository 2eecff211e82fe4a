"""One pass over an epoch's order: note, tune, next item, batch.

next ── the last step is noted ── tuner, if it is time ── the next number ─┬─ a worker has it ── (compared) ─┬─ batch
                                                                           └─ fetched here, under its seed ──┘
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.autoloader.batch_comparison import BatchComparison
from autotune_loader.autoloader.found import Found
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.seeds import Seeds, mixed
from autotune_loader.autoloader.work import Sent, Times
from autotune_loader.autoloader.workers import GivenUpError, LostError, Made, Workers
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.values import MAIN_PROCESS, LoaderConfig

PATIENCE_S, PATIENCE_FETCHES = 10.0, 20.0
"""Workers that nobody asked for are given up after the longer of these."""
MOST_TRAINING_CHANGES = 3
"""Epochs in whose midst the training changes the data; then workers are given up for good."""
FEW_COMPARED = 0.01
"""An epoch in which no larger share of batches was compared tells how fast its configuration is."""
NO_WORKERS = LoaderConfig()

log = logging.getLogger("autotune_loader.autoloader")


@dataclass(eq=False, kw_only=True)
class Shared:
    """What all iterators of one loader share, as long as its parts and its settings are the same."""

    found: Found
    sent: Sent
    samplers: dict[str, Any]
    seeds: Seeds | None
    """None where no batch draws."""
    context: Any
    timeout_s: float
    pins: bool
    keeps: bool
    """Whether workers are kept whatever they did: `persistent_workers`."""
    workers: Workers | None = None
    """Those that no iterator has now."""
    users: int = 0
    """Iterators that have some; workers that nobody asked for are one's at a time, as `comparison` knows one beginning."""
    training_changes: int = 0

    def __post_init__(self) -> None:
        self.is_asked = self.found.tuner.asked.num_workers > 0

    @functools.cached_property
    def comparison(self) -> BatchComparison:
        """What is known of the data; the first call looks at them."""
        return BatchComparison({**self.sent.named, **self.samplers}, self.found.tuner.refuse, is_asked=self.is_asked)

    def take_workers(self) -> Workers:
        """Those that are there, if they cannot be told from new ones, or new ones."""
        if self.workers is None or not self._are_fit(self.workers):
            self.end_workers()
            self.comparison.begin()
            asked, prepared = self.found.tuner.asked.num_workers, self.comparison.prepared
            self.workers = Workers(self.sent, self.context, asked=asked, prepared=prepared, pins=self.pins)
        workers, self.workers = self.workers, None
        self.users += 1
        return workers

    def _are_fit(self, workers: Workers) -> bool:
        is_free = self.keeps or (self.sent.init_fn is None and workers.are_like_new and self.comparison.has_stayed())
        return is_free and len(workers) > 0  # a fork has none of them

    def give_workers(self, workers: Workers, *, are_wanted: bool = True) -> None:
        self.users -= 1
        self.found.lost, workers.lost = self.found.lost + workers.lost, 0
        if are_wanted and self.workers is None:
            workers.rest()
            self.workers = workers
        else:
            workers.close()

    def end_workers(self) -> None:
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()


class EpochIterator(_BaseDataLoaderIter):
    """The batches of an epoch, in order, whoever makes them. With persistent workers it begins again.

    To whoever looks it is torch's iterator. It does not know the loader, so that both go, and the workers with them, when
    the last reference does. The one that was begun last is the one that tunes.

    Args:
        loader: whose names are shown.
        shared: by all iterators of the loader.
        order: of the epoch.
        begun: when `iter()` was called.
    """

    def __init__(self, loader: Any, shared: Shared, order: Order, begun: float) -> None:
        self._dataset, self._index_sampler = loader.dataset, loader._index_sampler
        self._num_workers, self._persistent_workers = loader.num_workers, loader.persistent_workers
        self._pool: Workers | None = None
        self._here = shared.sent.fetcher(time.thread_time)
        self._begin(shared, order, begun)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: ARG002 - torch's signature
        """Start another epoch, with the workers of the one before."""
        begun = time.monotonic()
        self._leave()
        shared, order = loader._next_epoch()
        self._begin(shared, order, begun)

    def _begin(self, shared: Shared, order: Order, begun: float) -> None:
        self._shared, self.order = shared, order
        self._base_seed, self._num_yielded, self._next = order.seed, 0, order.delivered
        self._tuner, self._log = shared.found.tuner, shared.found.log
        self._config = NO_WORKERS if shared.is_asked else self._tuner.asked
        self._is_parked, self._slowest_s, self._is_pure, self._compared_here = False, 0.0, True, 0
        self._loop = self._log.begin(begun)
        self._begun_with = self._log.totals.active_s, self._log.totals.samples
        # Fetches of a loop that asked for no workers are watched, and what its sampler draws.
        self._watches = not shared.is_asked and self._tuner.refused is None
        if self._watches:
            _ = shared.comparison
        if shared.is_asked:
            self._guarded(self._apply)
        self._loop.started(time.monotonic())

    def __next__(self) -> Any:
        now, tuner = time.monotonic(), self._tuner
        self._loop.ask(now)
        is_time = now >= tuner.wake or tuner.wanted is not self._config
        if is_time and (self._log.current is self._loop or tuner.refused is not None):
            self._guarded(self._think)
        return self._fetched() if self._pool is None else self._from_workers()

    def _think(self) -> None:
        now = time.monotonic()
        if now >= self._tuner.wake:
            self._tuner.look(now)
        if self._tuner.wanted is not self._config:
            self._apply()

    def _guarded(self, ours: Callable[[], None]) -> None:
        """Whatever goes wrong there, the epoch goes on; what it takes is tuning's own time."""
        begun, tuner = time.monotonic(), self._tuner
        try:
            ours()
        except Exception as error:
            log.warning("AutoLoader no longer tunes this loader: %s: %s", type(error).__name__, error, exc_info=True)
            tuner.freeze()
            tuner.wanted = tuner.asked
            if self._config != tuner.asked:
                self._apply()
        tuner.own_s += time.monotonic() - begun

    def _apply(self) -> None:
        """Run what is wanted, as soon as it may."""
        shared, tuner = self._shared, self._tuner
        wanted = tuner.wanted
        if wanted != tuner.asked and not shared.comparison.allows_another:
            wanted = tuner.asked  # as long as not, batches are watched or compared
        if wanted is self._config:
            return
        if wanted.num_workers:
            if self._pool is None and (self._is_parked or (shared.users and not shared.is_asked)):
                return
            try:
                self._start(wanted)
            except Exception as error:
                if wanted == tuner.asked:
                    raise
                tuner.refuse(Kept.CANNOT_START(why=f"{type(error).__name__}: {error}"))
                self._apply()
                return
        elif tuner.refused is not None:
            self._end_workers()
        elif self._pool is not None:
            self._pool.resize(0, 1)
        self._is_pure = self._is_pure and (self._num_yielded == 0 or wanted == self._config)
        self._config = wanted
        if wanted is tuner.wanted:
            tuner.applied(time.monotonic())

    def _start(self, wanted: LoaderConfig) -> None:
        shared = self._shared
        if self._pool is None:
            self._pool = shared.take_workers()
            self._pool.begin(self.order, self._initial_seed)
        self._pool.resize(wanted.num_workers, wanted.prefetch_factor or 1)
        if self._pool.start_s is not None:
            self._tuner.start_s = self._pool.start_s
        self._pool.wait_at_most(shared.timeout_s if shared.is_asked else self._patience_s)

    @property
    def _patience_s(self) -> float:
        return max(PATIENCE_S, PATIENCE_FETCHES * self._slowest_s)

    @property
    def _initial_seed(self) -> int:
        """What `torch.initial_seed()` tells in a fetch: the training's own, or with asked workers the epoch's."""
        return self.order.seed if self._shared.is_asked else torch.initial_seed()

    def _fetched(self) -> Any:
        order, shared, comparison = self.order, self._shared, None
        if self._watches and self._tuner.refused is None:
            comparison = shared.comparison
        try:
            is_own = comparison is not None and not order.is_torchs
            number, indices = comparison.draw(order.__next__) if comparison and is_own else next(order)
        except StopIteration:
            self._end()
            raise
        try:
            if comparison is None:
                batch, times = self._make(number, indices)
            else:
                batch, times = comparison.own(lambda: self._make(number, indices))
        finally:
            order.had(number)
            self._next = number + 1
        if shared.pins and not shared.is_asked:
            batch = pin_memory(batch)
        return self._delivered(batch, indices, (MAIN_PROCESS, *times))

    def _make(self, number: int, indices: Any) -> tuple[Any, Times]:
        seeds = self._shared.seeds
        if seeds is None or threading.current_thread() is not threading.main_thread():
            return self._here(indices)  # elsewhere the training may draw meanwhile
        made: tuple[Any, Times] = seeds.fetch(self._here, indices, mixed(self.order.seed, number), self._initial_seed)
        return made

    def _delivered(self, batch: Any, indices: Any, fetch: tuple[int, float, float, float, float]) -> Any:
        samples = len(indices) if isinstance(indices, list) else samples_in(batch) or 1
        self._num_yielded += 1
        self._slowest_s = max(self._slowest_s, fetch[3] - fetch[1])
        self._loop.receive(time.monotonic(), samples, fetch)
        return batch

    def _from_workers(self) -> Any:
        pool, shared, tuner = self._pool, self._shared, self._tuner
        assert pool is not None
        if not shared.is_asked and (what := shared.comparison.changed()) is not None:
            self._park(what)
            return self._fetched()
        if not pool.makes(self._next):
            return self._fetched()
        try:
            made = pool.get(self._next)
        except KeyError:  # it was put back
            return self._fetched()
        except Exception as error:  # or what a worker sent cannot be made into a batch here
            is_lost = isinstance(error, LostError)
            if shared.is_asked and not (is_lost and self._config != tuner.asked):
                if is_lost:
                    self._shutdown_workers()
                if isinstance(error, GivenUpError):  # as torch's
                    raise RuntimeError(str(error)) from None
                raise
            return self._without(error.why if isinstance(error, GivenUpError) else Kept.WORKER_ERROR(error=error))
        if made.changed is not None and not shared.is_asked:
            self.order.put_back([self._next])
            return self._without(Kept.DATASET_CHANGES(what=made.changed))
        return self._taken(self._next, made)

    def _taken(self, number: int, made: Made) -> Any:
        shared, tuner, indices, batch = self._shared, self._tuner, self.order.in_hand[number], made.batch
        fetch = (made.worker, *made.times)
        # Where some were asked for it begins when another number of them is wanted.
        is_in_question = not shared.is_asked or (
            tuner.refused is None and (tuner.wanted is not tuner.asked or shared.comparison.compared > 0)
        )
        is_compared = is_in_question and shared.comparison.is_due()
        self._next = number + 1
        try:
            if isinstance(batch, ExceptionWrapper) and shared.is_asked:
                batch.reraise()
            elif is_compared or isinstance(batch, ExceptionWrapper):
                self._compared_here += 1
                batch, fetch = self._compared(number, indices, batch)
        finally:
            self.order.had(number)
        return self._delivered(batch, indices, fetch)

    def _compared(self, number: int, indices: Any, other: Any) -> tuple[Any, tuple[int, float, float, float, float]]:
        """The loop's own batch; that of a worker which was asked for."""
        shared, tuner, times = self._shared, self._tuner, [(0.0, 0.0, 0.0, 0.0)]

        def make() -> Any:
            batch, times[0] = self._make(number, indices)
            return batch

        if isinstance(other, ExceptionWrapper):
            batch = make()  # raises, where it is the data's own
            tuner.refuse(Kept.WORKER_ERROR(error=str(other.exc_msg).strip().splitlines()[-1]))
        elif not shared.is_asked:
            batch = shared.comparison.compare(make, other, number)
        else:  # what was asked for is the worker's
            batch = other
            try:
                shared.comparison.compare(make, other, number)
            except Exception as error:
                tuner.refuse(Kept.SAMPLES_DIFFER(batch=number, what=f"the loop's raises {type(error).__name__}"))
        return batch, (MAIN_PROCESS, *times[0])

    def _without(self, why: Finding) -> Any:
        """The next batch, from now on without those workers."""
        self._end_workers()
        self._tuner.refuse(why)
        self._apply()
        return self._fetched() if self._pool is None else self._from_workers()

    def _park(self, what: str) -> None:
        """The training has changed what workers have copies of: until the epoch ends batches are fetched here."""
        self._end_workers()
        self._is_parked = True
        self._shared.training_changes += 1
        if self._shared.training_changes >= MOST_TRAINING_CHANGES:
            self._tuner.refuse(Kept.TRAINING_CHANGES(what=what))
        if what.partition(".")[0] in self._shared.samplers:
            self.order.batch_anew()

    def _end(self) -> None:
        if self.order.is_over:
            return
        self.order.is_over = True
        self._give_workers()
        self._loop.end(time.monotonic())
        totals, (active_s, samples) = self._log.totals, self._begun_with
        is_own = self._is_pure and self._compared_here <= FEW_COMPARED * self._num_yielded
        if self._log.current is self._loop and is_own:
            self._tuner.epoch(self._config, totals.active_s - active_s, totals.samples - samples, self._num_yielded)

    def _give_workers(self, *, are_wanted: bool = True) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._shared.give_workers(pool, are_wanted=are_wanted)

    def _end_workers(self) -> None:
        self._give_workers(are_wanted=False)
        self._config = NO_WORKERS

    def _leave(self) -> None:
        """Left early: a generator is the loader's and perhaps others', which draw before the next epoch begins."""
        if not self.order.is_over:
            self._give_workers()
            self.order.leave()

    def __del__(self) -> None:
        try:  # noqa: SIM105 - modules may be gone: the interpreter ends
            self._leave()
        except Exception:  # noqa: S110
            pass

    @property
    def _workers(self) -> list[Any]:
        return [] if self._pool is None else self._pool.processes

    def _shutdown_workers(self) -> None:
        self._end_workers()
        self._shared.end_workers()
