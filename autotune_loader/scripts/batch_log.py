"""What a training loop spent on one loader: batches, samples, and how long it waited, over all epochs of the script.

epoch begins ── asks ── receives ── step ── asks ── receives ── step ── asks ── is told that the epoch is over
                 waits                       waits                       waits
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from autotune_loader.live.traces import PAUSE_S, PAUSE_STEPS
from autotune_loader.pipeline.batches import bytes_of, tensors_in
from autotune_loader.pipeline.trace_log import History
from autotune_loader.scripts.carrying import Fetch
from autotune_loader.scripts.gpu_work import GpuWork
from autotune_loader.values.trace import BatchTrace

MOST_ROWS = 20_000
"""Batches whose histories are kept at least; twice as many at most (10 MiB)."""
CPU_EVERY_S = 0.25
"""So often the CPU time of this process is read."""


class BatchLog:
    """Adds up what the loops over one loader see, in seconds of one clock. Pauses, in which nobody asks, are no steps.

    Args:
        gpu: takes over samples of the GPU in the same stretches; the current CUDA device's where None.
    """

    def __init__(self, gpu: GpuWork | None = None) -> None:
        self.gpu = gpu or GpuWork()
        self.batches = self.samples = self.epochs = 0
        self.waited_s = 0.0
        """Between asking for a batch and having it; workers that were waited for at an epoch's start included."""
        self.began_s = 0.0
        """Of it, until the first batch of each epoch was there."""
        self.stepped_s = 0.0
        """Between having a batch and asking for the next."""
        self.running = 0
        """Epochs that have begun and not ended; after `break`, until the next one begins."""
        self.cpu: deque[tuple[float, float]] = deque(maxlen=4096)
        """Now and then: the time, and seconds of CPU of this process."""
        self.batch_bytes = self.batch_tensors = 0
        """Of the largest first batch of an epoch."""
        self.is_on_device = False
        """Whether batches come on an accelerator."""
        self._rows = History()

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
        self.is_on_device = any(each.device.type != "cpu" for each in tensors)

    def note(self, fetch: Fetch, samples: int, asked: float, received: float, step_end: float) -> None:
        """A batch with its history."""
        self._rows.note(((*fetch, samples), asked, received, step_end))
        if len(self._rows) > 2 * MOST_ROWS:
            self._rows.forget(MOST_ROWS)
        if not self.cpu or step_end >= self.cpu[-1][0] + CPU_EVERY_S:
            self.cpu.append((step_end, time.process_time()))


class Epoch:
    """One pass of a loop over the loader, which counts from when its first batch is asked for.

    Args:
        log: adds up.
    """

    def __init__(self, log: BatchLog) -> None:
        self.log, self.batches = log, 0
        self._is_begun = self.is_over = self._is_left = False
        log.running += 1
        self._last: tuple[Fetch | None, int, float, float] | None = None

    def blocked(self, seconds: float) -> None:
        """Making the iterator held the loop up for so long."""
        self.log.waited_s += seconds
        self.log.began_s += seconds

    def ask(self, now: float) -> None:
        """The loop asks for a batch: its step has ended."""
        log, last = self.log, self._last
        if not self._is_begun:
            self._is_begun = True
            log.epochs += 1
        if last is None:
            log.gpu.begin(now)
            return
        self._last = None
        fetch, samples, asked, received = last
        step_s = now - received
        if step_s <= PAUSE_S or step_s <= PAUSE_STEPS * log.stepped_s / log.batches or log.batches == 1:
            log.stepped_s += step_s
            log.gpu.go_on(now)
        else:
            log.gpu.begin(now)
        if fetch is not None:
            log.note(fetch, samples, asked, received, now)

    def receive(self, asked: float, now: float, samples: int, fetch: Fetch | None = None) -> None:
        """The loop has a batch."""
        log = self.log
        if not self.batches:
            log.began_s += now - asked
        self.batches += 1
        log.batches += 1
        log.samples += samples
        log.waited_s += now - asked
        self._last = fetch, samples, asked, now

    def end(self, asked: float, now: float) -> None:
        """The loop was told that the epoch is over."""
        if not self.is_over:
            self.is_over = True
            self.log.waited_s += now - asked
            self.log.gpu.end(now)
            self.leave()

    def leave(self) -> None:
        """Nobody goes on with it."""
        if not self._is_left:
            self._is_left = True
            self.log.running -= 1
