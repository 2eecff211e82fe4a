"""What training loops spend on one loader: batches, samples, and how long they wait, over all epochs of the script.

epoch begins ── asks ── receives ── step ── asks ── receives ── step ── asks ── is told that the epoch is over
                 waits                       waits                       waits
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from autotune_loader.live.traces import PAUSE_S, PAUSE_STEPS
from autotune_loader.pipeline.batches import bytes_of, samples_in, tensors_in
from autotune_loader.pipeline.workload import length_of
from autotune_loader.scripts.carrying import Carried, Carrying, Fetch
from autotune_loader.values.trace import BatchTrace

MOST_ROWS = 20_000
"""Batches whose histories are kept at least; twice as many at most (10 MiB)."""
CPU_EVERY_S = 0.25
"""So often the CPU time of this process is read."""

logger = logging.getLogger(__name__)


class BatchLog:
    """Adds up what the loops over one loader see, in seconds of one clock. Pauses, in which nobody asks, are no steps."""

    def __init__(self) -> None:
        self.batches = self.samples = self.epochs = 0
        self.waited_s = self.began_s = self.stepped_s = 0.0
        """Until a batch was there, starts of workers included; of that, until the first of an epoch was; in steps."""
        self.running = 0
        """Epochs under way."""
        self.batch_bytes = self.batch_tensors = 0
        """Of the largest first batch of an epoch."""
        self.cpu: deque[tuple[float, float]] = deque(maxlen=4096)
        """Now and then: the time, and seconds of CPU of this process."""
        self._rows: list[BatchTrace] = []

    @property
    def active_s(self) -> float:
        """Seconds of training with this loader."""
        return self.waited_s + self.stepped_s

    @property
    def wait_share(self) -> float | None:
        """Share of them in which the loop waited; None before there was a step, without which there is no share."""
        return self.waited_s / self.active_s if self.stepped_s > 0 else None

    @property
    def starting_share(self) -> float:
        """Share of them in which the loop waited for epochs to start: for their first batch longer than for another."""
        others = self.batches - self.epochs
        if others <= 0 or self.active_s <= 0:
            return 0.0
        typical_s = (self.waited_s - self.began_s) / others
        return max(0.0, self.began_s - self.epochs * typical_s) / self.active_s

    def latest(self, most: int) -> list[BatchTrace]:
        """The latest batches whose history is known, oldest first."""
        return self._rows[max(0, len(self._rows) - most) :]

    def measure(self, batch: Any) -> None:
        """Look at the first batch of an epoch."""
        tensors = list(tensors_in(batch))
        self.batch_bytes = max(self.batch_bytes, sum(bytes_of(each) for each in tensors))
        self.batch_tensors = max(self.batch_tensors, len(tensors))

    def note(self, fetch: Fetch, samples: int, asked: float, received: float, step_end: float) -> None:
        """A batch with its history."""
        self._rows.append(BatchTrace(*fetch, samples, asked, received, step_end))
        if len(self._rows) > 2 * MOST_ROWS:
            del self._rows[:MOST_ROWS]
        if not self.cpu or step_end >= self.cpu[-1][0] + CPU_EVERY_S:
            self.cpu.append((step_end, time.process_time()))


class Loop:
    """Whoever takes batches from one iterator, epoch after epoch; an epoch counts from its first request on.

    The loader is not kept. `between` is called with the time before a batch is asked for.
    """

    flag: Carrying | None = None
    """Of the iterator, where its batches can take their times along."""

    def __init__(self, log: BatchLog, loader: Any, between: Callable[[float], None] | None = None) -> None:
        self._log, self._between = log, between
        size, is_stream = getattr(loader, "batch_size", None), getattr(loader, "_dataset_kind", 1) == 1
        self._size: int | None = size if isinstance(size, int) else None
        self._whole = 0 if self._size is None or is_stream else length_of(getattr(loader, "sampler", None)) or 0
        self._is_running = False
        self._made: float | None = time.monotonic()
        self._begin()

    def reset(self, begun: float | None = None) -> None:
        """Torch is done with starting workers, which it began when the loop was made, or begins again with those it has."""
        made, self._made = self._made, None
        if made is not None:
            self.blocked(time.monotonic() - (begun or made))
        elif self._is_asked or not self._is_running:  # another epoch begins with the same iterator
            self._begin()

    def asking(self) -> Iterator[Any]:
        """Begun where the loop asks for a batch; gives none."""
        self._made, now = None, time.monotonic()
        self.ask(now)
        if self._between is not None:
            self._between(now)
        return
        yield

    def receiving(self, batch: Any) -> Any:
        """The batch, as the loop gets it."""
        fetch = None
        try:
            if type(batch) is Carried:
                batch, fetch = batch
            elif self.flag is not None:
                fetch = self.flag.fetched()
            self.receive(time.monotonic(), batch, fetch)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            logger.debug("a batch was not counted", exc_info=True)
        return batch

    def ending(self) -> Iterator[Any]:
        """Begun where there are no more batches; gives none."""
        self.end(time.monotonic())
        return
        yield

    def _begin(self) -> None:
        self.leave()
        self._left, self._batches, self._asked = self._whole, 0, 0.0
        self._is_running, self._is_asked = True, False
        self._last: tuple[Fetch | None, int, float, float] | None = None
        self._log.running += 1

    def blocked(self, seconds: float) -> None:
        """Making the iterator held the loop up for so long."""
        self._log.waited_s += seconds
        self._log.began_s += seconds

    def ask(self, now: float) -> None:
        """The loop asks for a batch: its step has ended."""
        if not self._is_running:  # asked once more, or begun again without a word
            self._begin()
        log, last, self._last, self._asked = self._log, self._last, None, now
        if not self._is_asked:
            self._is_asked = True
            log.epochs += 1
        if last is None:
            return
        fetch, samples, asked, received = last
        step_s = now - received
        if step_s <= PAUSE_S or step_s <= PAUSE_STEPS * log.stepped_s / log.batches or log.batches == 1:
            log.stepped_s += step_s
        if fetch is not None:
            log.note(fetch, samples, asked, received, now)

    def receive(self, now: float, batch: Any, fetch: Fetch | None = None) -> None:
        """The loop has a batch."""
        log, samples = self._log, self._samples(batch)
        if not self._batches:
            log.began_s += now - self._asked
            log.measure(batch)
        self._batches += 1
        log.batches += 1
        log.samples += samples
        log.waited_s += now - self._asked
        self._last = fetch, samples, self._asked, now

    def end(self, now: float) -> None:
        """The loop is told that the epoch is over."""
        if self._is_running:
            self._log.waited_s += now - self._asked
            self.leave()

    def leave(self) -> None:
        """Nobody goes on with this epoch."""
        self._log.running -= self._is_running
        self._is_running = False

    def _samples(self, batch: Any) -> int:
        if not self._left or self._size is None:  # torch does not count them out
            return samples_in(batch) or self._size or 1
        size = min(self._size, self._left)
        self._left -= size
        return size

    def __del__(self) -> None:
        self.leave()
