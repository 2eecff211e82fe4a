"""Torch's own iterators, which tell how long the loop waited and, where their batches carry it, how long each was made.

An iterator stays the object that torch made, of a class made from its own: its workers, its order, its end and whatever a
framework reads of it are what they would be.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.live.pool import PoolLoader
from autotune_loader.live.state import LoaderState
from autotune_loader.live.traces import Change
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.tracing import TracedCollate, TracedDataset, TracedEpoch, TracedWorkerInit, Wrapped
from autotune_loader.probe.burst_loop import BatchShape
from autotune_loader.scripts.tally import Tally
from autotune_loader.values.lines import is_ours

RECORD = "_autotune_loader_record"
"""Attribute of an iterator that is watched."""
# As `traceback` prints it.
FRAME = re.compile(r'  File "([^"\n]+)", line \d+, in [^\n]*\n(?:    [^\n]*\n)*')

log = logging.getLogger(__name__)


class _Plain:
    """Pickled as what it wraps is, by the script's own names: a spawned worker imports what it would without us."""

    def __reduce__(self) -> tuple[Any, ...]:
        parts = ("_inner",) if isinstance(self, (Wrapped, TracedWorkerInit)) else ("_collate_fn", "_batched")
        return type(self), tuple(object.__getattribute__(self, name) for name in parts)


class _PlainDataset(_Plain, TracedDataset):
    pass


class _PlainEpoch(_Plain, TracedEpoch):
    pass


class _PlainCollate(_Plain, TracedCollate):
    pass


class _PlainWorkerInit(_Plain, TracedWorkerInit):
    pass


class Record:
    """What is known of one loader's batches: when they were asked for, and came."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def begin(self, blocked_s: float, *, is_new: bool) -> None:  # noqa: ARG002 - a history asks
        """An epoch begins, whose start held the loop up for so long; `is_new` where it has new workers."""
        self.tally.begin(blocked_s)

    def ask(self, now: float) -> None:
        """The loop asks for a batch."""
        self.tally.ask(now)

    def receive(self, asked: float, batch: Any) -> Any:
        """The loop gets a batch, as this returns it."""
        self.tally.receive(asked, time.monotonic(), samples_in(batch) or 1)
        return batch

    def end(self, asked: float) -> None:
        """The epoch is over."""
        self.tally.end(asked, time.monotonic())

    def next(self, advance: Callable[[Any], Any], iterator: Any) -> Any:
        """The next batch of an iterator, by its own `__next__`."""
        asked = time.monotonic()
        self.ask(asked)
        try:
            batch = advance(iterator)
        except StopIteration:
            self.end(asked)
            raise
        except Exception as error:
            forget_our_frames(error)
            raise
        return self.receive(asked, batch)


class History(Record):
    """Of batches that tell when they were made.

    Args:
        tally: of the loader.
        state: takes their histories, and thinks between two of them.
    """

    def __init__(self, tally: Tally, state: LoaderState) -> None:
        super().__init__(tally)
        self._state = state
        self._last: tuple[Any, float, float] | None = None

    def begin(self, blocked_s: float, *, is_new: bool) -> None:
        super().begin(blocked_s, is_new=is_new)
        self._last = None
        if is_new:
            state = self._state
            end, begun = state.traces.end, time.monotonic() - blocked_s
            change = Change(
                batch=end,
                serves_from=end,
                config=state.config,
                reason="epoch" if end else "start",
                begun=begun,
                blocked_s=blocked_s,
            )
            state.traces.changes.append(change)

    def ask(self, now: float) -> None:
        super().ask(now)
        state, last = self._state, self._last
        if last is not None:
            self._last = None
            state.traces.note((*last, now))
        if now >= state.wake:
            try:
                state.wake = state.look(now)
            except Exception:  # whatever it is, it is no reason to end somebody's training
                log.debug("this loader is not looked at any more", exc_info=True)
                state.wake = math.inf

    def receive(self, asked: float, batch: Any) -> Any:
        batch, fetch = batch
        state = self._state
        if state.shape is None:
            state.shape = BatchShape.of(batch)
        now = time.monotonic()
        self.tally.receive(asked, now, fetch[5])
        self._last = (fetch, asked, now)
        return batch

    def end(self, asked: float) -> None:
        super().end(asked)
        self._state.traces.trim()


def can_carry_history(loader: Any) -> bool:
    """Whether batches of a loader can tell when they were made, without any difference to whoever makes or gets them."""
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return False  # another iterator looks at the batches first
    return not isinstance(loader.dataset, (IterDataPipe, MapDataPipe))


@contextlib.contextmanager
def carrying_history(loader: Any) -> Iterator[None]:
    """Meanwhile an iterator that is made of the loader is one whose batches carry their history."""
    own = {name: vars(loader)[name] for name in ("dataset", "collate_fn", "worker_init_fn")}
    traced = _PlainEpoch if isinstance(loader.dataset, IterableDataset) else _PlainDataset
    changed = {
        "dataset": traced(own["dataset"]),
        "collate_fn": _PlainCollate(own["collate_fn"], loader.batch_sampler is not None),
        "worker_init_fn": _PlainWorkerInit(own["worker_init_fn"]),
    }
    vars(loader).update(changed)  # past DataLoader's guard; nothing of it is left afterwards
    try:
        yield
    finally:
        vars(loader).update(own)


def is_part_of_us(loader: Any) -> bool:
    """Whether it is one of an AutoLoader's or a probe's own loaders."""
    return isinstance(loader, PoolLoader) or issubclass(type(getattr(loader, "dataset", None)), Wrapped)


def watch(iterator: Any, record: Record) -> None:
    """Let an iterator tell the record."""
    if RECORD not in vars(iterator):
        kind: Any = type(iterator)
        iterator.__class__ = _watched(kind)
    vars(iterator)[RECORD] = record


@functools.lru_cache(maxsize=64)
def _watched(kind: Any) -> type:
    advance = kind.__next__

    def advance_told(iterator: Any) -> Any:
        return iterator._autotune_loader_record.next(advance, iterator)

    return type(
        kind.__name__, (kind,), {"__next__": advance_told, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def forget_our_frames(error: BaseException) -> None:
    """Take our frames out of the traceback that torch writes into the message of an error from a worker."""
    text = error.args[0] if error.args else None
    if isinstance(text, str) and "Original Traceback" in text:
        kept = FRAME.sub(lambda found: "" if is_ours(found[1]) else found[0], text)
        error.args = (type(text)(kept), *error.args[1:])
