"""One pass over an epoch's order, through one pool after another.

change_to ── old feed closed ── new pool started ── what the old one has in hand ── the new one's batches
                                (only where both fit into memory; else once the old one is empty)
worker lost ── pool closed ── what it had in hand is put back ── pool started anew ── the same batches, in order
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotune_loader.live import ledger
from autotune_loader.live.budgets import Budgets
from autotune_loader.live.order import Order
from autotune_loader.live.pool import Parts, Pool, WorkersLostError, without_frames
from autotune_loader.live.step_threads import StepThreads
from autotune_loader.live.traces import Change, LiveTraces
from autotune_loader.pipeline.stages import StageTally
from autotune_loader.pipeline.trace_log import REPORTED, Fetch
from autotune_loader.probe.burst_loop import BatchShape
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure

MOST_LOSSES = 3
"""After so many losses without a batch in between torch's error is raised: the next start would not help either."""

logger = logging.getLogger(__name__)


def _never(now: float) -> float:  # noqa: ARG001 - a tuner looks at the clock
    return math.inf


@dataclass(slots=True, kw_only=True)
class LoaderState:
    """What a loader and its running epochs share."""

    config: LoaderConfig
    """Wanted now; an epoch that finds another than its own changes to it."""
    budgets: Budgets
    traces: LiveTraces = field(default_factory=LiveTraces)
    shape: BatchShape | None = None
    """The largest batch seen at the start of an epoch."""
    losses: int = 0
    """Pools that were started anew because workers were lost."""
    stages: StageTally | None = None
    """What watched workers were at lately; None where they are not watched."""
    threads: StepThreads | None = None
    """Sets those of the step; None leaves them alone."""
    own: LoaderConfig | None = None
    """What the user would have: where another configuration raises, this one tries the same batch. None: no other runs."""
    failures: dict[LoaderConfig, Failure] = field(default_factory=dict)
    """Configurations that raised where the user's own did not."""
    wake: float = math.inf
    """When `look` is to be called next, in seconds of the traces' clock."""
    look: Callable[[float], float] = _never
    """Thinks between two batches; returns when to be called again."""


class EpochIterator(Iterator[Any]):
    """The batches of an epoch, in order, whatever happens to the workers. With persistent workers it begins again.

    It does not know the loader, so that both go, and the workers with them, when the last reference does.
    """

    def __init__(self, state: LoaderState) -> None:
        self._state = state
        self._note = state.traces.note
        self._pool: Pool | None = None
        self._next_pool: Pool | None = None

    def begin(self, parts: Parts, order: Order) -> None:
        """Start an epoch, with the workers of the one before where they were kept and fit."""
        self._parts, self.order, self._in_hand = parts, order, order.in_hand
        self._pools, self._losses, self._delivered = 0, 0, -1
        self._last: tuple[Fetch, float, float] | None = None
        self._suspect: tuple[LoaderConfig, int] | None = None
        self._is_measured = False
        self._first = self._state.traces.end
        self._close_next()
        ledger.is_busy(self)
        if not self._took_up():
            if self._pool is not None:
                self._pool.close()  # first, so that the old workers are gone before new ones come
                self._pool = None
            self._pool = self._started("epoch" if self._first else "start")

    def __next__(self) -> Any:
        requested = time.monotonic()
        if self._last is not None:
            fetch, asked, received = self._last
            self._last = None
            self._note((fetch, asked, received, requested))
        if requested >= self._state.wake:
            self._state.wake = self._state.look(requested)
        if self._state.config is not self._config:
            self._change()
        while True:
            pool = self._pool
            if pool is None:  # asked once more after its end, when its workers had been let go
                raise StopIteration
            try:
                pool.is_waiting = True
                batch, fetch, number = pool.receive()
                pool.is_waiting = False
                break
            except StopIteration:
                pool.is_waiting = False
                self._go_on()
            except BaseException as error:
                pool.is_waiting = False
                if not self._recovered(error):
                    raise
        if number is None:
            self.order.received += 1
        else:
            self._in_hand.pop(number, None)
        if not self._is_measured:
            self._measure(batch)
        if len(fetch) == REPORTED and self._state.stages is not None:
            self._state.stages.add(fetch[-1])
            fetch = fetch[:-1]  # the log need not keep it
        self._last = (fetch, requested, time.monotonic())
        return batch

    def _took_up(self) -> bool:
        pool = self._pool
        if pool is None or pool.config is not self._state.config or not pool.config.persistent_workers:
            return False
        if not pool.is_whole:
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
        begun, before = time.monotonic(), len(self._in_hand)
        while True:
            self._config = self._carefully(self._state.config)
            ledger.make_room(lambda: self._state.budgets.fits_now(self._config, self._state.shape))
            try:
                pool = Pool(self._parts, self._config, self.order, self._pools)
                break
            except WorkersLostError as lost:
                if not self._may_go_on(was_killed=lost.was_killed):
                    raise lost.error from None
                if self._pool is not None:  # the new one has taken batches after those that the old one has in hand
                    self._pool.close(is_lost=True)
                    self._pool = None
                self.order.put_back()
            except Exception as error:
                if not self._is_given_up(self._config, error):
                    raise
        self._pools += 1
        if self._state.threads is not None:
            self._state.threads.set(self._config)
        now = time.monotonic()
        first = self._state.traces.end + (self._last is not None)
        self._state.traces.changes.append(
            Change(
                batch=first,
                serves_from=first + before,
                config=self._config,
                reason=reason,
                begun=begun,
                blocked_s=now - begun,
            )
        )
        return pool

    def _carefully(self, config: LoaderConfig) -> LoaderConfig:
        """One batch at a time after losses in a row, so that what kills workers does not take finished batches along."""
        if self._losses < MOST_LOSSES - 1 or self.order.delivered > self._delivered or not config.num_workers:
            return config
        return replace(config, num_workers=1, prefetch_factor=1)

    def _change(self) -> None:
        """Close the feed; start the next pool beside the old one where that is allowed."""
        pool = self._pool
        if (
            pool is None
            or self._parts.is_stream
            or self._next_pool is not None
            or not pool.feed.is_open
            or not self.order.has_more
        ):
            return
        pool.feed.is_open = False
        if self._state.budgets.may_overlap(pool.config, self._state.config, self._state.shape):
            started = self._started("change")
            if self._pool is None:
                self._pool = started
            else:
                self._next_pool = started

    def _go_on(self) -> None:
        """From a pool that is empty to the next; raises StopIteration at the end of the epoch."""
        pool = self._pool
        assert pool is not None
        if pool.feed.is_open or (self._next_pool is None and not self.order.has_more):
            self.order.is_over = True
            self._state.traces.trim()
            if pool.config.persistent_workers:
                ledger.rests(self)
            raise StopIteration
        self._pool, self._next_pool = self._next_pool, None
        pool.close()
        if self._pool is None:
            self._pool = self._started("change")

    def _recovered(self, error: BaseException) -> bool:
        """Starts anew after a loss; False for what is no loss, or one too many, and is the caller's to raise.

        Nothing is raised here: a frame that holds the exception which holds the frame would keep the workers alive.
        """
        pools = [pool for pool in (self._pool, self._next_pool) if pool is not None]
        lost = [pool for pool in pools if isinstance(error, Exception) and pool.has_lost(error)]
        if not lost or self._parts.is_stream:
            if isinstance(error, Exception) and not self._is_tried_again(error):
                self.order.drop_next()
                return False
            return isinstance(error, Exception)
        may_go_on = self._may_go_on(was_killed=any(pool.was_killed for pool in lost))
        without_frames(error)
        for pool in pools:
            pool.close(is_lost=True)
        count, self._next_pool = self.order.put_back(), None
        if not may_go_on:
            return False
        self._pool = None
        self._pool = self._started("loss")
        logger.warning("%s; started %s, %d batches are fetched again", error, self._config, count)
        return True

    def _is_given_up(self, config: LoaderConfig, error: Exception) -> bool:
        """Whether the user's own configuration takes the place of one that failed."""
        own = self._state.own
        if own is None or config.key() == own.key() or self._parts.is_stream:
            return False
        message = f"{type(error).__name__} with {config}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
        self._state.failures[config.key()] = Failure(kind="user_exception", phase="batches", message=message)
        self._state.config = own
        return True

    def _is_tried_again(self, error: Exception) -> bool:
        """Whether the user's own configuration shall fetch the batch that raised with another one.

        Where it raises there, too, it is the data's fault, and the other configuration goes on.
        """
        pool, number = self._pool, min(self._in_hand, default=-1)
        assert pool is not None
        if self._suspect is not None and self._suspect[1] == number:
            suspect, self._suspect = self._suspect[0], None
            self._state.failures.pop(suspect.key(), None)
            self._state.config = suspect
            return False
        if not self._is_given_up(pool.config, error):
            return False
        self._suspect = (pool.config, number)
        logger.warning("%s; its batch is fetched again with %s", error, self._state.config)
        without_frames(error)
        for each in (self._pool, self._next_pool):
            if each is not None:
                each.close()
        self._pool = self._next_pool = None
        self.order.put_back()
        self._pool = self._started("loss")
        return True

    def _may_go_on(self, *, was_killed: bool) -> bool:
        """Counts a loss; after one by SIGKILL fewer workers are wanted."""
        self._losses = self._losses + 1 if self.order.delivered == self._delivered else 1
        self._delivered = self.order.delivered
        self._state.losses += 1
        if self._losses >= MOST_LOSSES:
            return False
        config = self._state.config
        if was_killed and config.num_workers > 1:
            self._state.config = replace(config, num_workers=config.num_workers // 2)
        return True

    def _measure(self, batch: Any) -> None:
        shape = BatchShape.of(batch)
        known = self._state.shape
        self._state.shape = shape if known is None or shape.bytes > known.bytes else known
        self._is_measured = True

    def let_go(self) -> None:
        """End the kept workers; the next epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _close_next(self) -> None:
        if self._next_pool is not None:
            self._next_pool.close()
            self._next_pool = None
