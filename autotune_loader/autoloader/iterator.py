"""One pass over an epoch: a note of each step, the tuner if it is time, torch's `_next_data` over channels, the batch.

next ── the last step is noted ── tuner, if it is time: another number of workers ── torch's own __next__ ── noted
"""

from __future__ import annotations

import logging
import time
from typing import Any

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.elastic import ElasticIter
from autotune_loader.autoloader.worker import LOOKED
from autotune_loader.diagnosis import Kept
from autotune_loader.pipeline.batches import samples_in
from autotune_loader.pipeline.loop_log import Fetch
from autotune_loader.values import LoaderConfig

log = logging.getLogger("autotune_loader.autoloader")


class TunedIter(torchs.BaseIter):  # type: ignore[misc]
    """What asked and unasked iterators have in common. The one that was begun last is the one that tunes.

    Attributes:
        indices, fetch: Of the batch that was delivered last, and how it was made.
    """

    indices: Any = None
    fetch: Fetch | None = None
    _config: LoaderConfig

    def _begin(self, live: Any, begun: float) -> None:
        self._live, self._tuner, self._log = live, live.tuner, live.found.log
        self._loop = self._log.begin(begun)

    def __next__(self) -> Any:
        now, tuner = time.monotonic(), self._tuner
        self._loop.ask(now)
        is_time = now >= tuner.wake or tuner.wanted is not self._config
        if is_time and (self._log.current is self._loop or tuner.refused is not None):
            self._think(now)
        try:
            batch = super().__next__()
        except StopIteration:
            self._end()
            raise
        self._loop.receive(time.monotonic(), self._samples(batch), self.fetch)
        return batch

    def _samples(self, batch: Any) -> int:
        try:
            is_known = self._auto_collation and self.indices is not None
            return len(self.indices) if is_known else samples_in(batch) or 1
        except Exception:  # of somebody's own class
            return 1

    def _think(self, now: float) -> None:
        """Whatever goes wrong here, the epoch goes on; what it takes is tuning's own time."""
        live, tuner, best = self._live, self._tuner, self._tuner.best
        try:
            if now >= tuner.wake:
                live.look_at_memory(self._workers, now)
                tuner.look(now)
            if tuner.wanted is not self._config:
                self._apply()
            if tuner.best != best and live.on_change is not None:
                live.on_change(live.found)
        except Exception as error:
            log.warning("AutoLoader no longer tunes this loader", exc_info=True)
            tuner.refuse(Kept.NOT_TUNED(error=f"{type(error).__name__}: {error}"))
        tuner.own_s += time.monotonic() - now

    def _end(self) -> None:
        loop, batches = self._loop, self._num_yielded
        loop.end(now := time.monotonic())
        if self._log.current is loop:
            self._log.marks.note(now, lambda end: self._tuner.epoch(end - loop.begun, batches))


class AskedIter(TunedIter, ElasticIter):
    """Workers were asked for: as many as are wanted now, from 1 up."""

    def __init__(self, loader: Any, live: Any, begun: float) -> None:
        self._begin(live, begun)
        wanted = self._config = live.tuner.wanted
        ElasticIter.__init__(
            self,
            loader,
            wanted.num_workers,
            wanted.prefetch_factor,
            is_seeded=live.is_seeded,
            fetch_threads=live.fetch_threads,
            asked=live.tuner.asked.num_workers,
            is_elastic=live.tuner.refused is None,
        )
        live.tell(wanted.num_workers, wanted.prefetch_factor)
        live.tuner.start_s = self.start_s
        self._loop.started(time.monotonic())

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            super()._reset(loader, first_iter)
            return
        self._begin(self._live, time.monotonic())
        super()._reset(loader)
        if self._tuner.wanted is not self._config:
            self._apply()
        self._loop.started(time.monotonic())

    def _next_data(self) -> Any:
        try:
            return super()._next_data()
        finally:
            if self._worker_result_queue.note == LOOKED:
                self._worker_result_queue.note = None
                self._tuner.refuse(Kept.WORKER_INFO())

    def _apply(self) -> None:
        wanted, in_flight = self._tuner.wanted, self.outstanding
        if self._dataset_kind != torchs.ITERABLE:
            self.resize(wanted.num_workers, wanted.prefetch_factor or 1)
        self._config, self._tuner.start_s = wanted, self.start_s
        self._live.tell(wanted.num_workers, wanted.prefetch_factor)
        self._live.batch_bytes = self._worker_result_queue.batch_bytes
        self._tuner.applied(time.monotonic(), in_flight)

    def failed(self) -> None:
        self._tuner.failed(time.monotonic())
        self._config = self._tuner.wanted
        self._live.tell(self._config.num_workers, self._config.prefetch_factor)
