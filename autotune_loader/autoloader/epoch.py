"""One pass over an epoch's order: note, tune, next item, batch.

next ── the last step is noted ── tuner, if it is time ── the next number ─┬─ a worker has it ── (compared) ─┬─ batch
                                                                           └─ fetched here, under its seed ──┘
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.autoloader.batch_comparison import BatchComparison
from autotune_loader.autoloader.found import Found
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.parts import Noted, Parts
from autotune_loader.autoloader.seeds import Seeds, mixed
from autotune_loader.autoloader.work import Sent
from autotune_loader.autoloader.workers import GivenUpError, Workers
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.loop_log import Fetch
from autotune_loader.pipeline.workload import draws_nothing
from autotune_loader.values import MAIN_PROCESS, LoaderConfig

PATIENCE_S, PATIENCE_FETCHES = 10.0, 20.0
"""Workers that nobody asked for are given up after the longer of these."""
NO_WORKERS = LoaderConfig()

log = logging.getLogger("autotune_loader.autoloader")


class Shared:
    """What all iterators of one loader share, as long as its parts and settings stay the same; the loader itself is not kept.

    `how` says how workers are that it did not ask for.
    """

    def __init__(self, loader: Any, found: Found, how: dict[str, Any]) -> None:
        has_batches = loader.batch_sampler is not None
        self.found, self.is_asked = found, loader.num_workers > 0
        self.sent = Sent(loader.dataset, loader.collate_fn, loader.worker_init_fn, has_batches)
        self._named = {**self.sent.named, "batch_sampler" if has_batches else "sampler": loader._index_sampler}
        draws = not draws_nothing(loader.dataset, loader.collate_fn)
        self.seeds = Seeds(Parts(self.sent.named).generators) if draws else None
        # Workers that nobody asked for are forked: started anew they would run a script that has no `__main__` guard.
        context = loader.multiprocessing_context or how.get("multiprocessing_context")
        self._context = context or (None if self.is_asked else "fork")
        self.timeout_s = loader.timeout or how.get("timeout", 0.0)
        self.pins = loader.pin_memory and torch.accelerator.is_available()
        self.on_change = loader.on_change
        self.keeps = loader.persistent_workers or bool(how.get("persistent_workers"))
        self.workers: Workers | None = None
        """Those that no iterator has now."""
        self.users, self.slowest_s = 0, 0.0
        """Iterators that have some; the longest fetch so far."""

    @functools.cached_property
    def comparison(self) -> BatchComparison:
        """What is known of the data; the first call looks at them."""
        return BatchComparison(self._named, self.found.tuner.refuse, is_asked=self.is_asked)

    def take_workers(self) -> Workers:
        """Those that are there, if they cannot be told from new ones, or new ones."""
        kept, self.workers = self.workers, None
        self.users += 1
        if kept is not None and kept.processes and (self.keeps or self._are_like_new(kept)):  # a fork has no processes
            return kept
        if kept is not None:
            kept.close()
        began_with, asked = Noted(Parts(self._named), whole=True), self.found.tuner.asked.num_workers
        ready, pins = self.comparison.ready, self.pins
        return Workers(self.sent, self._context, asked=asked, began_with=began_with, ready=ready, pins=pins)

    def _are_like_new(self, workers: Workers) -> bool:
        return self.sent.init_fn is None and workers.changed is None and workers.began_with.has_stayed()

    def give_workers(self, workers: Workers | None, *, are_wanted: bool) -> None:
        if workers is None:
            return
        self.users -= 1
        if are_wanted and self.workers is None:
            workers.begin(None)
            self.workers = workers
        else:
            workers.close()


class EpochIterator(_BaseDataLoaderIter):
    """The batches of an epoch, in order, whoever makes them. With persistent workers it begins again.

    To whoever looks it is torch's iterator. It does not know the loader, so that both go, and the workers with them, when
    the last reference does. The one that was begun last is the one that tunes. `begun` is when `iter()` was called.
    """

    def __init__(self, loader: Any, begun: float, shared: Shared, order: Order) -> None:
        self._dataset, self._index_sampler = loader.dataset, loader._index_sampler
        self._num_workers, self._persistent_workers = loader.num_workers, loader.persistent_workers
        self._pool: Workers | None = None
        self._fetch = shared.sent.fetcher(time.thread_time)
        self._begin(begun, shared, order)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: ARG002 - torch's signature
        """Start another epoch, with the workers of the one before."""
        begun = time.monotonic()
        self._leave()
        self._begin(begun, *loader._next_epoch())

    def _begin(self, begun: float, shared: Shared, order: Order) -> None:
        self._shared, self.order = shared, order
        self._base_seed, self._num_yielded, self._next = order.seed, 0, 0
        self._tuner, self._log, self._is_asked = shared.found.tuner, shared.found.log, shared.is_asked
        self._config = NO_WORKERS if shared.is_asked else self._tuner.asked
        self._begun, self._loop = begun, self._log.begin(begun)
        # What `torch.initial_seed()` tells in a fetch: the training's own, or with asked workers the epoch's.
        self._initial_seed = order.seed if shared.is_asked else torch.initial_seed()
        if shared.is_asked:
            self._apply()
        elif self._tuner.refused is None:
            _ = shared.comparison  # looks at the data before the first fetch
        self._loop.started(time.monotonic())

    def __next__(self) -> Any:
        now, tuner = time.monotonic(), self._tuner
        self._loop.ask(now)
        is_time = now >= tuner.wake or tuner.wanted is not self._config
        if is_time and (self._log.current is self._loop or tuner.refused is not None):
            self._think(now)
        return self._batch()

    def _batch(self) -> Any:
        return self._fetched() if self._pool is None else self._from_workers(self._pool)

    def _think(self, begun: float) -> None:
        """Whatever goes wrong here, the epoch goes on; what it takes is tuning's own time."""
        tuner, best = self._tuner, self._tuner.best
        try:
            if begun >= tuner.wake:
                tuner.look(begun)
            self._apply()
            if tuner.best != best and self._shared.on_change is not None:
                self._shared.on_change(self._shared.found)
        except Exception as error:
            log.warning("AutoLoader no longer tunes this loader", exc_info=True)
            self._without(Kept.NOT_TUNED(error=f"{type(error).__name__}: {error}"))
        tuner.own_s += time.monotonic() - begun

    def _apply(self) -> None:
        """Run what is wanted, as soon as it may."""
        shared, tuner = self._shared, self._tuner
        wanted = tuner.wanted
        if wanted != tuner.asked and not shared.comparison.allows_another:
            wanted = tuner.asked  # as long as not, batches are watched or compared
        # Workers that nobody asked for are one iterator's at a time.
        must_wait = wanted.num_workers and self._pool is None and shared.users and not self._is_asked
        if wanted is self._config or must_wait:
            return
        if wanted.num_workers:
            if self._pool is None:
                self._pool = shared.take_workers()
                self._pool.begin(self.order, self._initial_seed)
            patience_s = max(PATIENCE_S, PATIENCE_FETCHES * shared.slowest_s)
            self._pool.patience_s = shared.timeout_s if self._is_asked else patience_s
            self._pool.resize(wanted.num_workers, wanted.prefetch_factor or 1)
            tuner.start_s = self._pool.start_s or tuner.start_s
        elif tuner.refused is not None:
            self._end_workers()
        elif self._pool is not None:
            self._pool.resize(0, 1)
        self._config = wanted
        if wanted is tuner.wanted:
            tuner.applied(time.monotonic())

    def _fetched(self) -> Any:
        """The next batch, fetched here; fetches of a loop that asked for no workers are watched, and what its sampler draws."""
        order, shared = self.order, self._shared
        comparison = None if self._is_asked or self._tuner.refused is not None else shared.comparison
        try:
            number, indices = next(order) if comparison is None else comparison.draw(order)
        except StopIteration:
            self._end()
            raise
        try:
            make = functools.partial(self._make, number, indices)
            batch, fetch = make() if comparison is None else comparison.own(make)
        finally:
            order.had(number)
            self._next = number + 1
        return self._delivered(batch, indices, fetch)

    def _make(self, number: int, indices: Any) -> tuple[Any, Fetch]:
        seeds = self._shared.seeds
        if seeds is None or threading.current_thread() is not threading.main_thread():
            batch, times = self._fetch(indices)  # elsewhere the training may draw meanwhile
        else:
            batch, times = seeds.fetch(self._fetch, indices, mixed(self.order.seed, number), self._initial_seed)
        return pin_memory(batch) if self._shared.pins else batch, (MAIN_PROCESS, *times)

    def _delivered(self, batch: Any, indices: Any, fetch: Fetch) -> Any:
        samples = len(indices) if isinstance(indices, list) else samples_in(batch) or 1
        self._num_yielded += 1
        self._shared.slowest_s = max(self._shared.slowest_s, fetch[3] - fetch[1])
        self._loop.receive(time.monotonic(), samples, fetch)
        return batch

    def _from_workers(self, pool: Workers) -> Any:
        number = self._next
        try:
            made = pool.get(number)
        except Exception as error:  # or what a worker sent cannot be made into a batch here
            why = error.why if isinstance(error, GivenUpError) else None
            if not self._is_asked or (why is not None and self._config != self._tuner.asked):
                self._without(why or Kept.WORKER_ERROR(error=error))
                return self._batch()
            if why is not None:  # as torch's
                self._shutdown_workers()
                raise RuntimeError(str(error)) from None
            raise
        if made is None:
            return self._fetched()
        (batch, fetch), indices = made, self.order.in_hand[number]
        self._next = number + 1
        try:
            if isinstance(batch, ExceptionWrapper) and self._is_asked:
                batch.reraise()
            elif isinstance(batch, ExceptionWrapper) or self._is_due():
                batch, fetch = self._compared(number, indices, batch)
        finally:
            self.order.had(number)
        return self._delivered(batch, indices, fetch)

    def _is_due(self) -> bool:
        """Whether this batch of a worker's is to be compared; asked workers' are once another number of them is wanted."""
        tuner, comparison = self._tuner, self._shared.comparison
        is_wanted = tuner.refused is None and (tuner.wanted is not tuner.asked or comparison.compared > 0)
        return (is_wanted or not self._is_asked) and comparison.is_due()

    def _compared(self, number: int, indices: Any, other: Any) -> tuple[Any, Fetch]:
        """The loop's own batch; that of a worker which was asked for."""
        refuse, comparison = self._tuner.refuse, self._shared.comparison
        if isinstance(other, ExceptionWrapper):
            made = self._make(number, indices)  # raises, where it is the data's own
            refuse(Kept.WORKER_ERROR(error=str(other.exc_msg).strip().splitlines()[-1]))
            return made
        try:
            batch, fetch = comparison.compare(lambda: self._make(number, indices), other, number)
        except Exception as error:
            if not self._is_asked:
                raise
            refuse(Kept.SAMPLES_DIFFER(batch=number, what=f"the loop's raises {type(error).__name__}"))
            return other, (MAIN_PROCESS, 0.0, 0.0, 0.0, 0.0)
        return other if self._is_asked else batch, fetch

    def _without(self, why: Finding) -> None:
        """From now on as it was asked for."""
        self._end_workers()
        self._tuner.refuse(why)
        self._apply()

    def _end(self) -> None:
        if not self.order.is_over:
            self.order.is_over = True
            self._give_workers()
            self._loop.end(now := time.monotonic())
            if self._log.current is self._loop:
                self._tuner.epoch(now - self._begun, self._num_yielded)

    def _give_workers(self, *, are_wanted: bool = True) -> None:
        pool, self._pool = self._pool, None
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
        if self._shared.workers is not None:
            self._shared.workers.close()
