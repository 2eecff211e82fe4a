"""One pass over an epoch's order: note, tune, next item, batch.

next ── the last step is noted ── tuner, if it is time ── the next number ─┬─ a worker has it ── (compared) ─┬─ batch
                                                                           └─ fetched here, under its seed ──┘
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.autoloader.comparison import WATCHED
from autotune_loader.autoloader.log import Loop
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.seeds import mixed
from autotune_loader.autoloader.state import DrawnAhead, LoaderState
from autotune_loader.autoloader.tuner import GATE_BATCHES
from autotune_loader.autoloader.workers import LostError, Made, SilentError, Workers
from autotune_loader.diagnosis import Kept
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.results.record import Finding
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import MAIN_PROCESS

PATIENCE_S, PATIENCE_FETCHES = 10.0, 20.0
"""Workers that nobody asked for are given up after the longer of these."""
MOST_TRAINING_CHANGES = 3
"""Epochs in whose midst the training changes the data; then workers are given up for good."""
UNWATCHED = GATE_BATCHES // 2 - WATCHED
"""Batches of the loop before some are watched: short loops are left alone."""

log = logging.getLogger("autotune_loader.autoloader")


class EpochIterator(_BaseDataLoaderIter):
    """The batches of an epoch, in order, whoever makes them. With persistent workers it begins again.

    To whoever looks it is torch's iterator. It does not know the loader, so that both go, and the workers with them, when
    the last reference does.

    Args:
        loader: whose names are shown.
        state: shared by all iterators of the loader.
        order: of the epoch.
        begun: when `iter()` was called.
    """

    def __init__(self, loader: Any, state: LoaderState, order: Order, begun: float) -> None:
        self._dataset, self._index_sampler = loader.dataset, loader._index_sampler
        self._num_workers, self._persistent_workers = loader.num_workers, loader.persistent_workers
        self._pool: Workers | None = None
        self._here = state.sent.fetcher(time.thread_time)
        _running.add(self)
        self._begin(loader, state, order, begun)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: ARG002 - torch's signature
        """Start another epoch, with the workers of the one before."""
        begun = time.monotonic()
        self._leave()
        state, order = loader._next_epoch()
        self._begin(loader, state, order, begun)

    def _begin(self, loader: Any, state: LoaderState, order: Order, begun: float) -> None:
        self._state, self.order, self._in_order = state, order, loader.in_order
        self._base_seed, self._num_yielded, self._next = order.seed, 0, order.delivered
        self._config, self._is_parked = LoaderConfig(), False
        self._slowest_s = 0.0
        self._loop: Loop = state.found.log.begin(begun)
        self._begun_with = state.found.log.totals.active_s, state.found.log.totals.samples
        self._is_pure = True
        if (previous := None if state.current is None else state.current()) is not None and previous is not self:
            previous._tuner = None
        state.current = weakref.ref(self)
        self._tuner = state.found.tuner
        self._ahead = None
        if self._tuner is not None and self._tuner.wanted != self._config:
            self._tuner.wake = 0.0  # it is taken up with the first batch
        if self._tuner is not None and not state.found.is_asked:
            state.known()
            self._ahead = None if order.source.is_torchs else DrawnAhead(self._refuse)
        if state.found.is_asked:
            self._guarded(self._apply) if self._tuner is not None else self._apply()
        self._loop.started(time.monotonic())

    def __next__(self) -> Any:
        now = time.monotonic()
        self._loop.ask(now)
        tuner = self._tuner
        if tuner is not None and now >= tuner.wake:
            self._guarded(self._think)
        if self._pool is None:
            return self._fetched()
        return self._from_workers()

    def _think(self) -> None:
        if self._tuner is not None:
            self._tuner.look(time.monotonic())
        self._follow()

    def _guarded(self, ours: Callable[[], None]) -> None:
        """Whatever goes wrong there, the epoch goes on; what it takes is tuning's own time."""
        begun, tuner = time.monotonic(), self._tuner
        try:
            ours()
        except Exception as error:
            log.warning("AutoLoader no longer tunes this loader: %s: %s", type(error).__name__, error, exc_info=True)
            self._tuner, found = None, self._state.found
            if tuner is not None:
                tuner.freeze()
                tuner.wanted = found.asked
            if self._config != found.asked:
                self._apply()
        if tuner is not None:
            tuner.ledger.own_s += time.monotonic() - begun

    def _apply(self) -> None:
        """Run what is wanted, as soon as it may."""
        state, wanted = self._state, self._state.found.config
        if wanted != state.found.asked and not state.known().allows_another:
            return  # as long as not, batches are watched or compared
        if wanted.num_workers:
            if self._pool is None and (self._is_parked or self._is_held_elsewhere()):
                return
            self._start(wanted)
        elif self._pool is not None:
            self._pool.resize(0, 1)
        self._is_pure = self._is_pure and (self._num_yielded == 0 or wanted == self._config)
        self._config = wanted
        if self._tuner is not None:
            self._tuner.applied(time.monotonic())

    def _is_held_elsewhere(self) -> bool:
        """Whether another iterator of a script that asked for no workers has them."""
        mine = self._state
        return not mine.found.is_asked and any(
            other is not self and other._state is mine and other._pool is not None for other in list(_running)
        )

    def _start(self, wanted: LoaderConfig) -> None:
        state = self._state
        if self._pool is None:
            pool = state.take_workers(state.known().undo)
            pool.begin(self.order, self._initial_seed())
            self._pool = pool
        try:
            self._pool.resize(wanted.num_workers, wanted.prefetch_factor or 1)
        except Exception as error:
            if state.found.is_asked and wanted == state.found.asked:
                raise
            self._refuse(Kept.CANNOT_START(why=f"{type(error).__name__}: {error}"))
            return
        if self._tuner is not None and self._pool.start_s is not None:
            self._tuner.start_s = self._pool.start_s
        self._pool.wait_at_most(state.timeout_s if state.found.is_asked else self._patience_s)

    @property
    def _patience_s(self) -> float:
        return max(PATIENCE_S, PATIENCE_FETCHES * self._slowest_s)

    def _initial_seed(self) -> int:
        """What `torch.initial_seed()` tells in a fetch: the training's own, or with asked workers the epoch's."""
        return self.order.seed if self._state.found.is_asked else torch.initial_seed()

    def _fetched(self) -> Any:
        order = self.order
        try:
            item = next(order) if self._ahead is None else self._ahead.next(order.__next__)
        except StopIteration:
            self._end()
            raise
        number, indices = item
        try:
            batch, times = self._made(number, indices)
        finally:
            order.had(number)
            self._next = number + 1
        if self._state.pins and not self._state.found.is_asked:
            batch = pin_memory(batch)
        return self._delivered(batch, indices, (MAIN_PROCESS, *times))

    def _made(self, number: int, indices: Any) -> Any:
        """The batch and its times; the first one and those before workers start are watched."""
        tuner, proof = self._tuner, self._state.proof
        if tuner is None or proof is None or self._state.found.is_asked:
            return self._make(number, indices)
        if not proof.has_fetched:
            return proof.first(lambda: self._make(number, indices))
        self._state.fetched += 1
        if self._state.fetched < UNWATCHED or self._state.found.refused is not None or proof.is_watched:
            return self._make(number, indices)
        made = proof.watch(lambda: self._make(number, indices))
        if tuner.wanted.num_workers or self._state.found.refused is not None:
            self._guarded(self._follow)
        return made

    def _make(self, number: int, indices: Any) -> Any:
        seeds, order = self._state.seeds, self.order
        if seeds is None or threading.current_thread() is not threading.main_thread():
            return self._here(indices)  # elsewhere the training may draw meanwhile
        return seeds.fetch(self._here, indices, mixed(order.seed, number), self._initial_seed())

    def _delivered(self, batch: Any, indices: Any, fetch: tuple[int, float, float, float, float]) -> Any:
        samples = len(indices) if isinstance(indices, list) else samples_in(batch) or 1
        self._num_yielded += 1
        self._slowest_s = max(self._slowest_s, fetch[3] - fetch[1])
        self._loop.receive(time.monotonic(), samples, fetch)
        return batch

    def _from_workers(self) -> Any:
        pool, state = self._pool, self._state
        assert pool is not None
        if not state.found.is_asked and (what := state.known().changed()) is not None:
            self._park(what)
            return self._fetched()
        if not pool.makes(self._next, in_order=self._in_order):
            return self._fetched()
        try:
            number, made = pool.get(self._next, in_order=self._in_order)
        except SilentError as error:
            if state.timeout_s and state.found.is_asked:
                raise RuntimeError(f"DataLoader timed out after {state.timeout_s} seconds") from error
            return self._without(Kept.WORKER_SILENT(silent=self._patience_s))
        except LostError as error:
            if state.found.is_asked and (self._config == state.found.asked or state.found.tuner is None):
                self._shutdown_workers()
                raise RuntimeError(str(error)) from None
            return self._without(Kept.WORKERS_LOST(error=error))
        except KeyError:  # it was put back
            return self._fetched()
        except Exception as error:  # what a worker sent cannot be made into a batch here
            if state.found.is_asked:
                raise
            return self._without(Kept.WORKER_ERROR(error=error))
        return self._taken(number, made)

    def _taken(self, number: int, made: Made) -> Any:
        state, indices, batch = self._state, self.order.in_hand[number][1], made.batch
        proof = state.known()
        if made.changed is not None and not state.found.is_asked:
            self.order.put_back([number])
            return self._without(Kept.DATASET_CHANGES(what=made.changed))
        fetch: tuple[int, float, float, float, float] = (made.worker, *made.times)
        tuner, found = self._tuner, state.found
        may_change = tuner is not None and found.refused is None and (tuner.wanted != found.asked or proof.compared > 0)
        is_compared = (may_change or not found.is_asked) and proof.is_due()
        self._next = number + 1
        try:
            if isinstance(batch, ExceptionWrapper) and state.found.is_asked:
                batch.reraise()
            elif is_compared or isinstance(batch, ExceptionWrapper):
                batch, fetch = self._compared(number, indices, batch)
        finally:
            self.order.had(number)
        return self._delivered(batch, indices, fetch)

    def _compared(self, number: int, indices: Any, other: Any) -> tuple[Any, tuple[int, float, float, float, float]]:
        """The loop's own batch; that of a worker which was asked for."""
        state, times, self._is_pure = self._state, [(0.0, 0.0, 0.0, 0.0)], False

        def make() -> Any:
            batch, times[0] = self._make(number, indices)
            return batch

        if isinstance(other, ExceptionWrapper):
            chosen = make()  # raises, where it is the data's own
            state.found.refuse(Kept.WORKER_ERROR(error=str(other.exc_msg).strip().splitlines()[-1]))
        elif not state.found.is_asked:
            chosen = state.known().compare(make, other, number)
        else:  # what was asked for is the worker's
            chosen = other
            try:
                state.known().compare(make, other, number)
            except Exception as error:
                state.found.refuse(Kept.SAMPLES_DIFFER(batch=number, what=f"the loop's raises {type(error).__name__}"))
        self._guarded(self._follow)
        return chosen, (MAIN_PROCESS, *times[0])

    def _follow(self) -> None:
        """What is known of the data decides what may run."""
        found = self._state.found
        if found.refused is not None:
            self._refuse(found.refused)
        elif found.config != self._config:
            self._apply()

    def _refuse(self, why: Finding) -> None:
        """Only what was asked for may run from now on; what workers have in hand is fetched here."""
        state = self._state
        state.found.refuse(why)
        if self._pool is not None and not state.found.is_asked:
            self._end_workers()
        elif self._config != state.found.asked:
            self._apply()

    def _without(self, why: Finding) -> Any:
        """The next batch, from now on without those workers."""
        self._end_workers()
        self._refuse(why)
        return self._fetched() if self._pool is None else self._from_workers()

    def _park(self, what: str) -> None:
        """The training has changed what workers have copies of: until the epoch ends batches are fetched here."""
        self._end_workers()
        self._is_parked = True
        self._state.training_changes += 1
        if self._state.training_changes >= MOST_TRAINING_CHANGES:
            self._state.found.refuse(Kept.TRAINING_CHANGES(what=what))
        if what.partition(".")[0] in self._state.samplers:
            self.order.batch_anew()

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._state.found.lost += self._pool.lost
        self._pool, self._config = None, LoaderConfig()

    def _end(self) -> None:
        if self.order.is_over:
            return
        self.order.is_over = True
        self._give_workers()
        self._loop.end(time.monotonic())
        tuner, totals = self._tuner, self._state.found.log.totals
        if tuner is not None and self._is_pure:
            active_s, samples = self._begun_with
            tuner.epoch(self._config, totals.active_s - active_s, totals.samples - samples, self._num_yielded)

    def _give_workers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._state.give_workers(pool)

    def _leave(self) -> None:
        """Left early: a generator is the loader's and perhaps others', which draw before the next epoch begins."""
        if not self.order.is_over:
            self._give_workers()
            self.order.leave()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends
            self._leave()

    @property
    def _workers(self) -> list[Any]:
        return [] if self._pool is None else self._pool.processes

    def _shutdown_workers(self) -> None:
        self._end_workers()
        if self._state.workers is not None:
            self._state.workers.close()
            self._state.workers = None


_running: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
