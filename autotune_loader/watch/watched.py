"""One loader of a script: what it is, what its loops wait for, and the iterator that tells it.

next(iterator) ── ask ── the iterator's own __next__ ── receive      StopIteration ── end

No code of the user's runs for it: samples are counted by the lists of indices that torch draws for a batch, and of a batch
only tensors within Python's own containers are looked at.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from autotune_loader import LoaderConfig
from autotune_loader.loops.figures import LoopFigures, Workers, samples_in
from autotune_loader.pipeline.loop_log import Site

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first one waits for workers, and the last has no step after it."""
FIRST_LOOK_S, FIRST_LOOK_BATCHES = 10.0, 50
"""After so much training, the sooner of both, something can be said."""
LOOK_EVERY_S = 0.02
"""So often a batch is looked at more closely: with its CPU times, which take 10 us."""
WATCH = "_autotune_loader_watch"
"""Attribute of an iterator that is watched."""

log = logging.getLogger(__name__)


class ScriptLoader(LoopFigures):
    """A loader as people know it: by the line that makes it, however often it is made anew; it is not kept alive.

    Attributes:
        site, name: where it is made and what it reads; as people read it.
        first_look: called now and then, until something can be said of it.
        peers: all loaders of its process.
        next_look_s: when a batch is looked at more closely again, be it of a later epoch.
        epoch_samples: of the epochs that were not left early.
        delivered: batches of a stream by the number of the worker that made them.
        without_workers: what an iterator of torch's without any has in their place.
        ahead, reader: batches that a thread took ahead of the training; the name of the first such thread.
        waiting_since: when the batch was asked for that is awaited now.
        found: what tunes it under `run`, and what that has found, without the loader's data; None where nothing does.
        kept: why nothing tunes it under `run`, a `Finding`.
        settings: numbers of the loader that make it another one where the script changes them.
        owner, dataset, watch: the latest loader, its data and the `Watch` of its latest iterator, as weak references.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        own: LoaderConfig,
        first_look: Callable[[ScriptLoader], None],
        peers: Sequence[ScriptLoader] = (),
    ) -> None:
        super().__init__(own)
        self.without_workers = Workers(self, None, 0)
        self.site, self.name, self.peers = site, name, peers
        self.first_look: Callable[[ScriptLoader], None] | None = first_look
        self.next_look_s = 0.0
        self.waiting_since: float | None = None
        self.epoch_samples, self.delivered = set[int](), Counter[int]()
        self.ahead = 0
        self.reader: str | None = None
        self.found: Any = None
        self._shown: Any = None
        self.kept: Any = None
        self.settings: tuple[Any, ...] = ()
        self.owner: Callable[[], Any] = lambda: None
        self.dataset: Callable[[], Any] = lambda: None
        self.watch: Callable[[], Watch | None] = lambda: None

    def tune_by(self, found: Any) -> None:
        """From now on this tunes it; of what did so before, the latest that has shown something faster is still told of."""
        if self.found is not None and self.found.gain is not None:
            self._shown = self.found
        self.found = found

    @property
    def told(self) -> Any:
        """What tuning has found, as far as it is told."""
        is_new = self._shown is not None and self.found.gain is None
        return self._shown if is_new else self.found

    @property
    def has_workers(self) -> bool:
        """Whether worker processes have made any of its batches, also those of AutoLoader."""
        return super().has_workers or (self.found is not None and self.found.best.num_workers > 0)

    @property
    def is_running(self) -> bool:
        """Whether an epoch is under way."""
        watch = self.watch()
        return watch is not None and not watch.loop.is_over

    @property
    def is_read_ahead(self) -> bool:
        """Whether a thread takes most of the batches, ahead of the training."""
        return 2 * self.ahead > self.log.totals.batches

    @property
    def is_worth_telling(self) -> bool:
        """Whether something can be said by now."""
        totals = self.log.totals
        is_long = totals.active_s >= FIRST_LOOK_S and totals.batches >= FEWEST_BATCHES
        return (is_long or totals.batches >= FIRST_LOOK_BATCHES) and totals.wait_share is not None

    def __str__(self) -> str:
        """What its loops wait, also for the batch that is awaited now."""
        totals, since = self.log.totals, self.waiting_since
        now_s = 0.0 if since is None else time.monotonic() - since
        if not totals.batches:
            return f"the training loop has waited {now_s:.0f} s for its first batch so far"
        if totals.wait_share is None or totals.batches < FEWEST_BATCHES:
            count = "1 batch" if totals.batches == 1 else f"{totals.batches} batches"
            return f"{count} so far; the training loop has waited {totals.waited_s + now_s:.1f} s"
        share = (totals.waited_s + now_s) / (totals.active_s + now_s)
        return f"the training loop waits for data {share * 100:.0f}% of the time"


class Watch:
    """Whoever takes batches from one iterator of a loader, epoch after epoch; `begun` is when it began to be made.

    Attributes:
        is_noted: whether the iterator, one of ours, notes its batches in the loader's log itself.
        loop: over the present epoch.
        is_stream: whether the dataset is iterable.
        sizes: samples of the batches whose indices were drawn.
        workers: torch's.
        message: the number of the batch that came last, where one cannot tell otherwise.
    """

    def __init__(self, known: ScriptLoader, loader: Any, begun: float, iterator: Any = None) -> None:
        size = getattr(loader, "batch_size", None)
        own: Any = getattr(iterator, "_log", None)
        self.is_noted, self._is_ours, count = own is known.log, isinstance(own, type(known.log)), 0
        self._is_in_order = bool(loader.num_workers) and getattr(loader, "in_order", True)
        if self._is_ours:
            known.log.parent = own.parent
        elif count := loader.num_workers:
            known.log.workers_start(getattr(loader, "multiprocessing_context", None))
            known.log.workers = count
        self._known, self._size = known, size if isinstance(size, int) else 0
        self.is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        self.sizes, self.message = deque[int](), -1
        self.needs_messages = self.is_stream or not self._is_in_order
        self._is_quick, self._may_be_quick = False, not self.is_noted and known.log.sampled is None
        self.workers = Workers(known, iterator, count) if count or self._is_ours else known.without_workers
        self.loop = iterator._loop if self.is_noted else known.log.begin(begun)
        self._begin(begun)

    def _begin(self, now: float) -> None:
        self._is_started, self._samples = False, 0
        self._thread = threading.get_ident()
        self._is_beside = self._thread != threading.main_thread().ident
        self.sizes.clear()
        self.workers.begin(now)
        self._known.waiting_since = now

    def reset(self, iterator: Any, reset: Callable[[], None]) -> None:
        """An epoch begins; the first one did as the iterator was made. `reset` starts workers, or feeds those that are kept."""
        if self._is_started:
            now = time.monotonic()
            if not self.is_noted:
                self.loop = self._known.log.begin(now)
            self._begin(now)
        reset()
        self.workers.started(iterator)
        self._is_started = True
        if self.is_noted:
            self.loop = iterator._loop
        else:
            self.loop.started(time.monotonic())

    def take(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """The next batch, for which the loop has asked, its step being done."""
        known, loop, asked = self._known, self.loop, time.monotonic()
        is_quick = self._is_quick and asked < known.next_look_s and threading.get_ident() == self._thread
        if is_quick and self.workers.may_count(iterator) and loop.may_skip(asked):
            return self._take_quickly(fetch, iterator, asked)
        was_over = loop.is_over
        if not self.is_noted:
            loop.ask(asked)
        known.waiting_since = asked
        if self._is_beside or threading.get_ident() != self._thread:
            self._read_by_thread()
        asked_cpu = self._look(asked) if asked >= known.next_look_s else None
        nvtx = None if known.log.sampled is None else known.nvtx
        if nvtx is not None:
            try:
                nvtx.range_push(f"{known.name}: wait")
            except Exception:  # this torch has none
                nvtx = None
        try:
            batch = fetch(iterator)
        except StopIteration:
            if not was_over:
                self._end()
            raise
        finally:
            known.waiting_since = None
            if nvtx is not None:
                nvtx.range_pop()
        received = time.monotonic()
        if not self.is_noted:
            self._receive(iterator, batch, asked, received)
        if asked_cpu is not None:
            self._clocked(received, batch, asked_cpu)
        return batch

    def _take_quickly(self, fetch: Callable[[Any], Any], iterator: Any, asked: float) -> Any:
        """The next of batches that come within 2 ms: until one is looked at more closely, they are only counted."""
        self._known.waiting_since = asked
        try:
            batch = fetch(iterator)
        except StopIteration:
            self.loop.ask(asked)
            self._end()
            raise
        finally:
            self._known.waiting_since = None
        received = time.monotonic()
        if received - asked <= self.workers.quick_s:
            self.loop.skip(asked, received, self.count(iterator, batch))
        else:
            self.loop.ask(asked)
            self._receive(iterator, batch, asked, received)
        return batch

    def _receive(self, iterator: Any, batch: Any, asked: float, received: float) -> None:
        """The loop has a batch, with its history."""
        count, loop = self.count(iterator, batch), self.loop
        self._is_quick = self._may_be_quick and received - asked <= self.workers.quick_s
        if self._is_ours:
            loop.receive(received, count, iterator.fetch)
        else:
            number = getattr(iterator, "_rcvd_idx", 0) - 1 if self._is_in_order else self.message
            loop.receive(received, count, *self.workers.history(number, asked, received))

    def _end(self) -> None:
        """The epoch is over."""
        self.loop.end(time.monotonic())
        self._known.epoch_samples.add(self._samples)
        self.workers.gather()

    def count(self, iterator: Any, batch: Any) -> int:
        """Samples of the batch that is delivered."""
        size = self.sizes.popleft() if self.sizes else self._size_of(iterator, batch)
        self._samples += size
        return size

    def came(self, iterator: Any, number: Any, data: Any) -> None:
        """A worker has sent something; the end of its shard is no batch."""
        self.message = number
        if self.is_stream and type(number) is int and type(data).__name__ != "_IterableDatasetStopIteration":
            self._known.delivered[iterator._task_info[number][0]] += 1

    def _size_of(self, iterator: Any, batch: Any) -> int:
        """Samples of a batch for which torch drew no list of indices; an iterator of ours may have drawn one itself."""
        if self._size and not self.is_stream:
            drawn = getattr(iterator, "indices", None)
            return len(drawn) if type(drawn) is list else self._size
        found = samples_in(batch)
        return min(found, self._size) if found and self._size else found or self._size or 1

    def _read_by_thread(self) -> None:
        """A batch is asked for by a thread: it reads ahead, unless the main thread waits for its end, so that it trains."""
        known, thread = self._known, threading.get_ident()
        if thread == self._thread and self.loop.is_main_thread_waiting():
            self._is_beside = False
            return
        known.ahead += 1
        if known.reader is None:
            known.reader = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))

    def _look(self, now: float) -> Any:
        """Now and then: whether something can be said of the loader, and what CPU its batches take."""
        self._known.next_look_s = now + LOOK_EVERY_S
        if self._known.first_look is not None:
            self._known.first_look(self._known)
        return self._known.clock()

    def _clocked(self, now: float, batch: Any, asked: Any) -> None:
        """A batch whose CPU time was clocked."""
        known = self._known
        known.clocked(asked)
        try:
            known.look_into(batch)
            if now >= known.next_read_s:
                self.workers.look(now, self.loop.batches)
                for other in known.peers:
                    if other is not known and (watch := other.watch()) is not None:
                        watch.workers.look_at_idle(now, watch.loop.moment, known.log.totals.active_s)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a batch was not looked at", exc_info=True)


def watch_iterator(iterator: Any, known: ScriptLoader, loader: Any, begun: float) -> None:
    """From now on the iterator tells when it is asked for a batch, and when it has one."""
    kind: Any = type(iterator)
    if WATCH not in vars(iterator):
        vars(iterator)[WATCH] = Watch(known, loader, begun, iterator)
        iterator.__class__ = watched(kind)
    known.watch = weakref.ref(vars(iterator)[WATCH])


@functools.lru_cache(maxsize=64)
def watched(kind: Any) -> Any:
    """The subclass of a class of iterators; it has its name."""
    fetch = kind.__next__

    class Watched(kind):  # type: ignore[misc]
        def __next__(self) -> Any:
            return self.__dict__[WATCH].take(fetch, self)

        def _samples(self, batch: Any) -> int:  # an iterator of ours asks for it
            watch = self.__dict__[WATCH]
            count: int = watch.count(self, batch) if watch.is_noted else kind._samples(self, batch)
            return count

        def _next_index(self) -> Any:
            indices = kind._next_index(self)
            watch = self.__dict__[WATCH]
            if type(indices) is list and not watch.is_stream:
                watch.sizes.append(len(indices))
            return indices

        def _try_get_data(self, *args: Any, **arguments: Any) -> Any:
            found = kind._try_get_data(self, *args, **arguments)
            if found[0] and self.__dict__[WATCH].needs_messages:
                with contextlib.suppress(Exception):  # torch's own affair
                    self.__dict__[WATCH].came(self, *found[1])
            return found

        def _reset(self, *args: Any, **arguments: Any) -> None:
            self.__dict__[WATCH].reset(self, lambda: kind._reset(self, *args, **arguments))

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched
