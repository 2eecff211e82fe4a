"""One pass over an epoch's order, through one pool after another.

change_to ── old feed closed ── new pool started ── what the old one has in hand ── the new one's batches
                                (only where both fit into memory; else once the old one is empty)
worker lost ── pool closed ── what it had in hand is put back ── pool started anew ── the same batches, in order
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
import warnings
import weakref
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader.live.numbered import Raised
from autotune_loader.live.order import Order, settle
from autotune_loader.live.pool import Parts, Pool, WorkersLostError, without_frames
from autotune_loader.live.state import LoaderState
from autotune_loader.live.traces import Change
from autotune_loader.live.trust import OPTS_IN, Refusal, Trust, refusal
from autotune_loader.live.workers import disown
from autotune_loader.machine.limits import are_descriptors_scarce
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.look import Held
from autotune_loader.pipeline.tracing import REPORTED, Fetch
from autotune_loader.pipeline.workload import is_users
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.trace import BatchTrace

MOST_LOSSES = 3
"""After so many losses without a batch in between the configuration asked for runs, or torch's error is raised."""
CHANGED = Refusal(
    reason="the training has changed the dataset, its sampler or collate_fn in mid-epoch, which workers would not see",
    mend="num_workers=1 says that they need not",
)
LISTENS = Refusal(
    reason="between two batches its sampler draws from a generator that the training draws from, too, or is changed by it: "
    "further ahead that gives other batches",
    mend="a generator of its own, and changes between epochs",
)
FORKS = Refusal(reason="the script forks processes itself, and may wait for workers among them", mend=OPTS_IN)
KEPT = Refusal(
    reason="three of four descriptors are taken, as by batches that are kept: each tensor of a worker's is an open file",
    mend="a higher `ulimit -n`",
)
OVERDUE = Refusal(
    reason="workers delivered no batch for a minute or more", mend="num_workers=1 asks for them all the same"
)

logger = logging.getLogger("autotune_loader.live")


class EpochIterator(_BaseDataLoaderIter):
    """The batches of an epoch, in order, whatever happens to the workers. With persistent workers it begins again.

    To whoever looks it is torch's iterator. It does not know the loader, so that both go, and the workers with them, when
    the last reference does. Its batches are noted, and tuned, while it is the only one of the loader that runs.

    Args:
        loader: whose names are shown.
        state: shared by all iterators of the loader.
        parts: of the user.
        order: of the epoch.
        trust: kept alive as long as batches are wanted.
    """

    def __init__(self, loader: Any, state: LoaderState, parts: Parts, order: Order, trust: Trust | None) -> None:
        self._trust = trust
        self._dataset, self._index_sampler = loader.dataset, loader._index_sampler
        self._num_workers, self._persistent_workers = loader.num_workers, loader.persistent_workers
        self._shared, self._state = state, state.aside()
        self._note = self._state.traces.note
        self._pool: Pool | None = None
        self._next_pool: Pool | None = None
        self._held: Held | None = None
        self._config, self._is_on_trust = state.asked, False
        _running.add(self)
        self._begin(loader, parts, order)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: ARG002 - torch's signature
        """Start another epoch, with the workers of the one before where they are kept and fit."""
        if self._state is not self._shared:
            self._state = self._shared.aside()
        self._begin(loader, *loader._next_epoch())

    def _begin(self, loader: Any, parts: Parts, order: Order) -> None:
        self._parts, self.order, self._in_hand = parts, order, order.in_hand
        self._expected: int | None = loader._IterableDataset_len_called
        self._base_seed, self._num_yielded = order.seed, 0
        self._pools, self._losses, self._delivered = 0, 0, -1
        self._last: tuple[Fetch, float, float] | None = None
        self._suspect: tuple[LoaderConfig, int] | None = None
        self._innocent: LoaderConfig | None = None
        self._is_measured = False
        self._close(self._next_pool)
        self._next_pool = None
        self._has_begun = False
        if self._num_workers or parts.is_stream:
            self._begin_reading()
        while order.skip:  # a stream that is resumed
            order.skip -= 1
            next(self)

    def _begin_reading(self) -> None:
        """Start workers, which read sampler and dataset: as torch with `iter` where they were asked for, else with `next`."""
        self._has_begun = True
        if self._took_up():
            return
        self._close(self._pool)  # first, so that the old workers are gone before new ones come
        self._pool, self._held = None, None if self._trust is None else self._trust.held()
        self._pool = self._started("epoch" if self._shared.traces.end else "start")

    def __del__(self) -> None:
        """Left early: a generator is the loader's and perhaps others', which draw before the next epoch begins."""
        with contextlib.suppress(Exception):  # the interpreter ends
            if not self._parts.is_stream:
                settle(self.order)

    @property
    def _workers(self) -> list[Any]:
        return [process for pool in (self._pool, self._next_pool) if pool is not None for process in pool.processes]

    def _shutdown_workers(self) -> None:
        for pool in (self._pool, self._next_pool):
            self._close(pool)
        self._pool = self._next_pool = None
        self._has_begun = True

    def leave_to_parent(self) -> None:
        """In a process that the user has forked: the workers are not its own; it goes on with others, if it goes on."""
        if self._trust is not None:
            self._trust.close()
        pools = [pool for pool in (self._pool, self._next_pool) if pool is not None and pool.processes]
        if pools and not self._parts.is_stream:
            _of_parent.extend(pools)
            disown(self._workers)  # whose end at exit `multiprocessing` would see to
            self._pool = self._next_pool = None
            self.order.put_back()
            self._has_begun = False

    def __next__(self) -> Any:
        if not self._has_begun:
            self._begin_reading()
        requested = time.monotonic()
        state = self._state
        if self._last is not None:
            fetch, asked, received = self._last
            self._last = None
            self._note(BatchTrace(*fetch[:6], asked, received, requested))
        elif state is not self._shared and not self._num_yielded:
            state = self._claim()
        if requested >= state.wake:
            state.think(requested)
        if self._is_on_trust:
            if not self._still_holds:
                self._give_back(CHANGED)
            elif are_descriptors_scarce():
                self._give_back(KEPT)
        if self.order.listens and state.is_tuned:
            state.refuse(LISTENS)
        if state.config is not self._config and not state.awaits_proof:
            self._change()
        while True:
            pool = self._pool
            if pool is None:  # shut down
                raise StopIteration
            try:
                pool.is_waiting = pool.is_in_main
                batch, fetch, number, told = pool.receive()
                pool.is_waiting = False
            except StopIteration:
                pool.is_waiting = False
                self._go_on()
                continue
            except BaseException as error:
                pool.is_waiting = False
                if not self._recovered(error):
                    raise
                continue
            if told is not None and state.is_tuned:
                if self._is_on_trust:
                    self._give_back(refusal(told))  # this batch, too
                    continue
                state.refuse(refusal(told))
            if not isinstance(batch, Raised):
                break
            if (raised := self._judged(number, batch)) is not None:
                self._in_hand.pop(number, None)
                raised.reraise()
        if number is None:
            self.order.received += 1
        else:
            self._in_hand.pop(number, None)
        self._num_yielded += 1
        if not self._is_measured:
            self._measure(batch)
        if self._expected is not None and self._num_yielded > self._expected:
            self._warn_of_length()
        if len(fetch) == REPORTED and state.stages is not None:
            state.stages.append(fetch[-1])
        self._last = (fetch, requested, time.monotonic())
        return batch

    @property
    def _still_holds(self) -> bool:
        """Whether the dataset is what it was when workers began; takes microseconds (71 of a large dataset)."""
        return self._held is None or self._held.is_unchanged()

    @property
    def _is_alone(self) -> bool:
        holder = None if self._shared.tuned is None else self._shared.tuned()
        return holder is None or holder is self or holder.order.is_over

    def _claim(self) -> LoaderState:
        """Become the iterator that is tuned, where no other one runs."""
        shared = self._shared
        if not self._is_alone:
            return self._state
        end, mine = shared.traces.end, self._state.traces.changes
        shared.traces.changes += [replace(c, batch=c.batch + end, serves_from=c.serves_from + end) for c in mine]
        if self._pool is not None and self._pool.here is not None:
            self._pool.here.look = shared.make
        if shared.threads is not None:
            shared.threads.set(self._config)
        shared.tuned, self._state, self._note = weakref.ref(self), shared, shared.traces.note
        return shared

    def _took_up(self) -> bool:
        pool, state = self._pool, self._state
        if pool is None or not pool.config.persistent_workers or not pool.is_whole:
            return False
        if pool.config is not state.config and self._still_holds:  # else new workers would see another dataset
            return False
        try:
            pool.take_up(self.order)
        except Exception as error:
            if not pool.has_lost(error):
                raise
            self.order.put_back()
            pool.close(is_lost=True)
            return False
        self._config, self._pools = pool.config, 1
        return True

    def _started(self, reason: Literal["start", "change", "loss", "epoch"]) -> Pool:
        begun, before, state = time.monotonic(), len(self._in_hand), self._state
        while True:
            self._config = config = self._carefully(state.allowed)
            try:
                pool = Pool(self._parts, config, self.order, self._pools, state.make, state.patience_s)
                break
            except WorkersLostError as lost:
                if not self._may_go_on(lost, was_killed=lost.was_killed):
                    raise lost.error from None
                if self._pool is not None:  # the new one has taken batches after those that the old one has in hand
                    self._pool.close(is_lost=True)
                    self._pool = None
                self.order.put_back()
            except Exception as error:
                if not self._is_given_up(config, f"{type(error).__name__}: {error}"):
                    raise
        self._pools += 1
        workers, asked = config.num_workers, state.asked.num_workers
        self._is_on_trust = workers > 0 and not asked and not self._parts.is_stream
        if state.threads is not None:  # not of an iterator that runs beside the one that is tuned
            state.threads.set(config)
        now = time.monotonic()
        first = state.traces.end + (self._last is not None)
        change = Change(
            batch=first, serves_from=first + before, config=config, reason=reason, begun=begun, blocked_s=now - begun
        )
        state.traces.changes.append(change)
        return pool

    def _carefully(self, config: LoaderConfig) -> LoaderConfig:
        """One batch at a time after losses in a row, so that what kills workers does not take finished batches along."""
        if self._losses < MOST_LOSSES - 1 or self.order.delivered > self._delivered or not config.num_workers:
            return config
        return replace(config, num_workers=1, prefetch_factor=1)

    def _change(self) -> None:
        """Close the feed; start the next pool beside the old one where that is allowed."""
        pool, state = self._pool, self._state
        if pool is None or self._parts.is_stream or self._next_pool is not None or not pool.feed.is_open:
            return
        if state.config.num_workers and not self._still_holds:
            return  # workers that begin now would see what those of this epoch do not
        if not self.order.has_more:
            return
        pool.feed.is_open = False
        if state.budgets.may_overlap(pool.config, state.config, state.shape):
            started = self._started("change")
            if self._pool is None:
                self._pool = started
            else:
                self._next_pool = started

    def _go_on(self) -> None:
        """From a pool that is empty to the next; raises StopIteration at the end of the epoch."""
        pool = self._pool
        assert pool is not None
        is_ended = pool.feed.is_open and (self._parts.is_stream or self.order.is_ended)
        if is_ended or (self._next_pool is None and not self.order.has_more):
            self.order.is_over = True
            self._state.traces.trim()
            raise StopIteration
        self._pool, self._next_pool = self._next_pool, None
        pool.close()
        if self._pool is None:
            self._pool = self._started("change")

    def _give_back(self, refusal: Refusal, *, is_lost: bool = False) -> None:
        """From now on the training process makes the batches, those that workers have in hand first."""
        self._state.refuse(refusal)
        self._start_anew(is_lost=is_lost)

    def leave_no_child(self) -> None:
        """The user forks a process and will wait for children, perhaps for whatever child there is."""
        if self._is_on_trust and self._state.is_tuned and self._pool is not None and not self._pool.is_waiting:
            self._give_back(FORKS)

    def _start_anew(self, *, is_lost: bool = False) -> int:
        """End the workers and start anew with all that they had in hand; returns how many batches that are."""
        for pool in (self._pool, self._next_pool):
            self._close(pool, is_lost=is_lost)
        self._pool = self._next_pool = None
        count = self.order.put_back()
        self._pool = self._started("loss")
        return count

    def _recovered(self, error: BaseException) -> bool:
        """Starts anew after a loss; False for what is no loss, or one too many, and is the caller's to raise.

        Nothing is raised here: a frame that holds the exception which holds the frame would keep the workers alive.
        """
        pools = [pool for pool in (self._pool, self._next_pool) if pool is not None]
        if not self._state.asked.num_workers and not isinstance(error, Exception):  # Ctrl-C
            if self._is_on_trust:  # torch has lost what it was receiving, and would wait for it
                self._shutdown_workers()
                self._has_begun = False
            self.order.put_back()
        if self._is_on_trust and str(error).startswith("DataLoader timed out after"):
            self._give_back(OVERDUE, is_lost=True)
            return True
        lost = [pool for pool in pools if isinstance(error, Exception) and pool.has_lost(error)]
        if not lost or self._parts.is_stream:
            is_given_up = _has_no_descriptors(error) and self._is_given_up(self._config, str(error))
            if is_given_up:  # the loop keeps its batches, and each tensor from a worker holds an open file
                self._start_anew()
            return is_given_up
        without_frames(error)
        if not self._may_go_on(error, was_killed=any(pool.was_killed for pool in lost)):
            for pool in pools:
                pool.close(is_lost=True)
            self._next_pool = None
            self.order.put_back()
            return False
        if any(pool.was_left for pool in lost):
            self._is_given_up(self._config, str(error))
        count = self._start_anew(is_lost=True)
        logger.warning("%s; started %s, %d batches are fetched again", error, self._config, count)
        return True

    def _is_given_up(self, config: LoaderConfig, why: str) -> bool:
        """Whether the configuration asked for takes the place of one that failed."""
        state = self._state
        if not state.is_tuned or config.key() == state.asked.key() or self._parts.is_stream:
            return False
        state.failures[config.key()] = Failure(kind="user_exception", phase="batches", message=f"{config}: {why}")
        state.config = state.asked
        return True

    def _judged(self, number: int, raised: Raised) -> Raised | None:
        """What the data raise, or None where it is the configuration's fault, and the one asked for fetches the batch again."""
        config = self._config
        if self._is_on_trust:
            made = self._parts.made_here(self._in_hand[number])
            if isinstance(made, Raised):
                return made
        elif self._suspect is not None and self._suspect[1] == number:
            self._innocent, self._suspect = self._suspect[0], None
            self._state.failures.pop(self._innocent.key(), None)
            self._state.config = self._innocent
            return raised
        if config is self._innocent or not self._is_given_up(config, f"{raised}"):
            return raised
        self._suspect = (config, number)
        logger.warning("%s; batch %d is fetched again with %s", raised, number, self._state.config)
        self._start_anew()
        return None

    def _may_go_on(self, error: BaseException, *, was_killed: bool) -> bool:
        """Counts a loss; after one by SIGKILL fewer workers are wanted, after some in a row what was asked for."""
        self._losses = self._losses + 1 if self.order.delivered == self._delivered else 1
        self._delivered = self.order.delivered
        self._state.losses += 1
        config = self._state.config
        if self._losses >= MOST_LOSSES:
            return self._is_given_up(config, str(error))
        if was_killed and config.num_workers > 1:
            self._state.config = replace(config, num_workers=config.num_workers // 2)
        return True

    def _measure(self, batch: Any) -> None:
        self._is_measured = True
        try:
            shape = BatchShape.of(batch)
        except Exception as error:  # a batch's own code
            self._state.give_up(error)
            return
        known = self._state.shape
        self._state.shape = shape if known is None or shape.bytes > known.bytes else known

    def _warn_of_length(self) -> None:
        """As torch."""
        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be {self._expected}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. ",
            stacklevel=3,
        )

    @staticmethod
    def _close(pool: Pool | None, *, is_lost: bool = False) -> None:
        if pool is not None:
            pool.close(is_lost=is_lost)


_running: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
_of_parent: list[Pool] = []
"""In a fork: pools of the process that was forked. They are kept, as torch would end their workers with them."""


def _in_fork() -> None:
    for iterator in list(_running):
        iterator.leave_to_parent()


def _before_fork() -> None:
    if is_users(sys._getframe(1).f_globals.get("__name__")):
        for iterator in list(_running):
            iterator.leave_no_child()


os.register_at_fork(before=_before_fork, after_in_child=_in_fork)


def _has_no_descriptors(error: BaseException) -> bool:
    """Whether no file could be opened any more; torch says it in its own words where a descriptor is to be received."""
    return "ancdata" in str(error) or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE))
