"""The ranks of one training job, and what they say to each other through the store by which they have met.

    say("answer3") ──► store, where it stays until it is taken ──► heard: what is there now, or wait: with a deadline

Nobody needs to listen while another speaks. Whoever waits hears soon of a rank that has left, and of one on the same machine
whose process has ended; a rank of another machine that is silent is lost at the deadline.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autotune_loader.machine.processes import process_start
from autotune_loader.values.errors import TunerError

POLL_S = 0.01
"""Whoever waits asks this often."""
LOOK_S = 0.2
"""This often it looks whether the other is still there."""
LEAVING_S = 2.0
"""Whoever leaves waits so long for a store that does not answer."""
_begun: Counter[str] = Counter()
"""Conversations of each topic that have begun; they begin in the same order on all ranks."""


class RankLostError(TunerError):
    """A rank of the job died, did not answer in time, or failed in a way that ends the tuning on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process, so that others on the same machine can see whether it lives."""

    node: str
    init: str
    """When the first process began: in another container, IDs mean something else."""
    pid: int
    began: str

    @classmethod
    def here(cls) -> Place:
        pid = os.getpid()
        return cls(node=platform.node(), init=str(process_start(1)), pid=pid, began=str(process_start(pid)))

    @property
    def is_seen_from_here(self) -> bool:
        """Whether it is known here if its process lives."""
        return (self.node, self.init) == (platform.node(), str(process_start(1)))

    def has_ended(self) -> bool:
        """Whether its process is known to be gone."""
        return self.is_seen_from_here and process_start(self.pid) != self.began


@dataclass(frozen=True, slots=True)
class Link:
    """This rank's part in a conversation of all ranks."""

    store: Any
    """A `torch.distributed.Store`."""
    rank: int
    ranks: int
    places: dict[int, Place] = field(default_factory=dict)
    """Of the ranks that have said where they are."""

    def say(self, what: str, value: object = None) -> None:
        """For the other ranks to hear."""
        self.store.set(f"{what}/{self.rank}", msgspec.msgpack.encode(value))

    def heard(self, what: str, rank: int, kind: Any = Any) -> Any:
        """What a rank has said; None before it did."""
        key = f"{what}/{rank}"
        return msgspec.msgpack.decode(self.store.get(key), type=kind) if self.store.check([key]) else None

    def from_others(self, what: str, kind: Any) -> list[Any] | None:
        """What every other rank has said; None while one is missing."""
        said = [self.heard(what, rank, kind) for rank in range(self.ranks) if rank != self.rank]
        return None if None in said else said

    def wait(self, what: str, rank: int, kind: Any, deadline_s: float) -> Any:
        """What a rank says within the deadline. An interrupted wait can be taken up again.

        Raises:
            RankLostError: it has left, its process has ended, or it was silent for so long.
        """
        is_over = threading.Event()
        try:
            return _within(max(deadline_s, POLL_S), lambda: self._next(what, rank, kind, is_over))
        except queue.Empty:
            raise RankLostError(
                f"rank {rank} did not answer within {max(deadline_s, 0.0):.0f} s (seen from rank {self.rank}); "
                "look at its log and stack (py-spy dump), then tune again"
            ) from None
        except RankLostError:
            raise
        except Exception as error:  # the store is kept by rank 0 or by what has started it
            raise RankLostError(
                f"rank 0 is gone (seen from rank {self.rank}): {first_line(error)}; look at its log"
            ) from error
        finally:
            is_over.set()

    def take(self, what: str, rank: int, kind: Any, deadline_s: float) -> Any:
        """As `wait`, for what nobody else needs to hear: the store forgets it."""
        said = self.wait(what, rank, kind, deadline_s)
        self.store.delete_key(f"{what}/{rank}")
        return said

    def leave(self, why: str = "") -> None:
        """Say that this rank says no more, and why where others need what it would have said."""
        with contextlib.suppress(Exception):  # a store that is gone tells the others itself
            _within(LEAVING_S, lambda: self.say("left", why))

    def _next(self, what: str, rank: int, kind: Any, is_over: threading.Event) -> Any:
        why, look_at = None, time.monotonic() + POLL_S
        while not is_over.is_set():
            if time.monotonic() >= look_at:
                # Looked at before the store: what a rank said in its last moment counts.
                why, look_at = self._why_lost(rank), time.monotonic() + LOOK_S
            if (said := self.heard(what, rank, kind)) is not None:
                return said
            if why is not None:
                raise RankLostError(why)
            is_over.wait(POLL_S)
        return None

    def _why_lost(self, rank: int) -> str | None:
        left = self.heard("left", rank, str)
        if left is not None:
            return f"rank {rank} gave up: {left or 'it came to its end'}"
        place = self.places.get(rank)
        # Whether it began when it said is not asked: that is told by clocks, which are set.
        if place is not None and place.is_seen_from_here and process_start(place.pid) is None:
            return f"rank {rank} is gone (seen from rank {self.rank}); look at its log for the reason"
        return None


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns; `queue.Empty` where that takes too long.

    In a thread: torch's store waits for a host that is lost as long as the network does, and lets no Ctrl-C through meanwhile.
    """
    found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((call(), None))
        except BaseException as error:
            found.put((None, error))

    threading.Thread(target=run, name="autotune-rank", daemon=True).start()
    value, error = found.get(timeout=seconds)
    if error is not None:
        raise error
    return value


def is_one_of_many() -> bool:
    """Whether this process is one of several ranks."""
    from torch import distributed

    is_job = distributed.is_available() and distributed.is_initialized()
    return is_job and distributed.get_world_size() > 1


def job_link(topic: str) -> Link:
    """The link of the next conversation on a topic, which is the same on all ranks.

    Raises:
        RankLostError: the ranks of this job have no store.
    """
    from torch import distributed

    _begun[topic] += 1
    try:
        store = distributed.distributed_c10d._get_default_store()
    except Exception as error:  # MPI's ranks meet without one
        raise RankLostError(f"the ranks of this job have no store to talk through: {first_line(error)}") from error
    prefixed: Any = distributed.PrefixStore(f"autotune_loader/{topic}/{_begun[topic]}", store)  # type: ignore[attr-defined]
    return Link(prefixed, distributed.get_rank(), distributed.get_world_size())


def first_line(error: BaseException) -> str:
    """What an error says, without its traceback."""
    return (str(error) or type(error).__name__).splitlines()[0]
