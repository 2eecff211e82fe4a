"""The ranks of one job tune as one: rank 0 decides, all change at the same batch, the rank that waits most is what counts.

    rank 0    order (configuration, from batch N on) ──► store ──► ... own block ... ──► the worst of all blocks
    rank r    look, now and then: an order? ──► at batch N: the same change ──► own block ──► store

Nothing here waits: the training's own gradients keep the ranks within a batch of each other, and what they say goes through the
store by which the job has met, never by a collective of its group.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import msgspec

from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.live.block_source import LOOK_S, BlockSource, Training, waiting_share
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement

AHEAD_S = 0.5
"""An order is given so long before its batch comes ..."""
POLL_S = 0.1
"""... and so often the ranks ask for one."""
PATIENCE_S = 10.0
"""Rank 0 waits no longer for another's figures than this after its own."""
MOST_TRACES = 64
"""Batches of a block that travel."""
CONNECT_S = 5.0

log = logging.getLogger(__name__)
_loaders = itertools.count()


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks do from a batch on."""

    config: LoaderConfig
    batch: int
    phase: Literal["search", "compare"] | None
    """Of the block that is observed; None where nothing is."""


@dataclass(frozen=True, slots=True)
class Link:
    """One loader's place in the store."""

    store: Store
    rank: int
    ranks: int

    def give(self, number: int, order: Order) -> None:
        self.store.set(f"order/{number}", msgspec.msgpack.encode(order))

    def order(self, number: int) -> Order | None:
        key = f"order/{number}"
        return msgspec.msgpack.decode(self.store.get(key), type=Order) if self.store.check([key]) else None

    def tell(self, number: int, seen: Measurement) -> None:
        few = replace(seen, traces=seen.traces[-MOST_TRACES:])
        self.store.set(f"figures/{number}/{self.rank}", msgspec.msgpack.encode(few))

    def figures(self, number: int) -> list[Measurement] | None:
        """Those of all other ranks; None while one is missing."""
        keys = [f"figures/{number}/{rank}" for rank in range(self.ranks) if rank != self.rank]
        if not self.store.check(keys):
            return None
        return [msgspec.msgpack.decode(self.store.get(key), type=Measurement) for key in keys]


def is_one_of_many() -> bool:
    """Whether this process is one of several ranks."""
    from torch import distributed

    is_job = distributed.is_available() and distributed.is_initialized()
    return is_job and distributed.get_world_size() > 1


def job_link() -> Link | None:
    """The link of the next loader of this process; None without other ranks, or where their store cannot be reached.

    Loaders count in the order in which they begin, which has to be the same on all ranks.
    """
    from torch import distributed

    if not is_one_of_many():
        return None
    number = next(_loaders)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    try:
        if address is None or port is None:
            raise ValueError("MASTER_ADDR and MASTER_PORT are not set")
        wait = timedelta(seconds=CONNECT_S)
        store: Any = distributed.TCPStore(address, int(port), is_master=False, timeout=wait)  # type: ignore[attr-defined]
    except Exception as error:
        log.warning("the other ranks cannot be reached, so this loader is only watched: %s", error)
        return None
    prefixed: Any = distributed.PrefixStore(f"autotune_loader/{number}", store)  # type: ignore[attr-defined]
    return Link(prefixed, distributed.get_rank(), distributed.get_world_size())


class LeaderSource(BlockSource):
    """Rank 0's source of evidence: every block and change is an order to all, from a batch on that none has reached yet."""

    def __init__(self, training: Training, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(training)
        self._link, self._clock = link, clock
        self._numbers = itertools.count()
        self._number, self._order, self._ask = 0, None, Ask()
        self._own: Evidence | None = None
        self._own_at = 0.0

    _order: Order | None

    def begin(self, config: LoaderConfig, ask: Ask) -> None:
        self._give(config, ask.phase)
        self._ask, self._own = ask, None

    def settle(self, config: LoaderConfig) -> None:
        self._give(config, None)

    @property
    def pause_s(self) -> float:
        return 0.0 if self._order is not None else LOOK_S

    def is_due(self) -> bool:
        order = self._order
        if order is None:
            return True
        if self._training.traces.end < order.batch:
            return False
        self._order = None
        if order.phase is None:
            super().settle(order.config)
        else:
            super().begin(order.config, self._ask)
        return True

    def evidence(self) -> Evidence | None:
        if not self.is_due():
            return None
        if self._own is None:
            self._own, self._own_at = super().evidence(), self._clock()
        if self._own is None or self._own.measurement is None:
            return self._own
        others = self._link.figures(self._number)
        if others is None:
            return self._own if self._clock() - self._own_at > PATIENCE_S else None
        worst = max([self._own.measurement, *others], key=waiting_share)
        return replace(self._own, outcome=worst)

    def _give(self, config: LoaderConfig, phase: Literal["search", "compare"] | None) -> None:
        traces = self._training.traces
        recent = traces.block(traces.end - 16)
        period_s = (recent[-1].step_end - recent[0].requested) / len(recent) if recent else AHEAD_S
        ahead = math.ceil(AHEAD_S / max(period_s, 1e-6)) + 2 if recent or phase is None else 0
        self._number = next(self._numbers)
        self._order = Order(config=config, batch=traces.end + ahead, phase=phase)
        self._link.give(self._number, self._order)


class Follower:
    """What every other rank does at its looks."""

    def __init__(self, training: Training, link: Link) -> None:
        self._training, self._link = training, link
        self._source = BlockSource(training)
        self._number = 0
        self._order: Order | None = None
        self._observed: int | None = None

    def look(self, now: float) -> float:
        """As `Tuner.look`."""
        if self._order is None:
            self._order = self._link.order(self._number)
        order = self._order
        if order is not None and self._training.traces.end >= order.batch:
            self._order, self._observed = None, self._number if order.phase is not None else None
            self._number += 1
            if not self._training.may_run(order.config):
                self._observed = None
            elif order.phase is None:
                self._source.settle(order.config)
            else:
                self._source.begin(order.config, Ask(phase=order.phase))
        if self._observed is not None and (seen := self._source.evidence()) is not None:
            if seen.measurement is not None:
                self._link.tell(self._observed, seen.measurement)
            self._observed = None
        return now + (POLL_S if self._order is None else 0.0)
