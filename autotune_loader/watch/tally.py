"""What training loops spend on one loader: batches, samples, and how long they wait, over all epochs of the script.

epoch begins ── asks ── receives ── step ── asks ── receives ── step ── asks ── is told that the epoch is over
                 waits                       waits                       waits
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune_loader.pipeline.batches import bytes_of, samples_in, tensors_in
from autotune_loader.pipeline.workload import length_of

PAUSE_S, PAUSE_STEPS = 0.5, 20.0
"""A step that is so long, and so many times the mean of the others, is a pause, such as a validation."""
FIRST_LOOK_S, FIRST_LOOK_BATCHES = 10.0, 50
"""After so much of training, the sooner of both, something can be said of it."""
FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first one waits for workers, and the last has no step after it."""
CPU_EVERY_S = 0.5
"""So often the CPU time of workers is read: 8 us each."""


class Tally:
    """Adds up what the loops over one loader see, in seconds. Pauses, in which nobody asks, are no steps."""

    def __init__(self, first_look: Callable[[], None] | None = None) -> None:
        self.first_look = first_look
        """Called once, when something can be said."""
        self.epochs = self.batches = self.samples = 0
        self.waited_s = 0.0
        """Until a batch was there, starts of workers included."""
        self.started_s = 0.0
        """Of that, until the first batch of an epoch was there."""
        self.stepped_s = 0.0
        self.loop_cpu_s = 0.0
        """CPU of the loop's own thread while it waited: for making batches, or for receiving those of workers."""
        self.worker_cpu_s = 0.0
        """CPU of torch's workers, for the batches of `worker_batches`."""
        self.worker_batches = 0
        self.batch_bytes = self.batch_tensors = 0
        """Of the largest first batch of an epoch."""

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
        typical_s = (self.waited_s - self.started_s) / others
        return max(0.0, self.started_s - self.epochs * typical_s) / self.active_s

    def __str__(self) -> str:
        """What the loop waits."""
        if self.wait_share is None:
            return "no step could be timed"
        starts = self.starting_share
        return f"the loop waits {percent(self.wait_share)} of its time" + (
            f", {percent(starts)} for epochs to start" if starts >= LEAST_SHARE else ""
        )

    def look(self) -> None:
        """Something may be said by now."""
        enough = self.batches >= FIRST_LOOK_BATCHES or (self.active_s >= FIRST_LOOK_S and self.batches >= FEWEST_BATCHES)
        if enough and self.first_look is not None:
            first_look, self.first_look = self.first_look, None
            first_look()

    def measure(self, batch: Any) -> None:
        """Look at the first batch of an epoch."""
        tensors = list(tensors_in(batch))
        self.batch_bytes = max(self.batch_bytes, sum(bytes_of(each) for each in tensors))
        self.batch_tensors = max(self.batch_tensors, len(tensors))


class Loop:
    """Whoever takes batches from one iterator, epoch after epoch; an epoch counts from its first batch on.

    Args:
        tally: of the loader.
        loader: of the iterator; it is not kept.
        begun: when the iterator began to be made.
        clock: monotonic, in seconds.
        cpu_clock: CPU seconds of the calling thread.
    """

    workers: Sequence[Any] = ()
    """Processes that make the batches."""

    def __init__(
        self,
        tally: Tally,
        loader: Any,
        begun: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.tally, self._clock, self._cpu_clock = tally, clock, cpu_clock
        size, is_stream = getattr(loader, "batch_size", None), getattr(loader, "_dataset_kind", 1) == 1
        self._size: int | None = size if isinstance(size, int) else None
        self._whole = 0 if self._size is None or is_stream else length_of(getattr(loader, "sampler", None)) or 0
        self.is_made = True
        self.begin(begun)

    def begin(self, now: float | None = None) -> None:
        """An epoch begins to be made; the same again until it is."""
        if not self.is_made:
            return
        self._begun = self._asked = self._clock() if now is None else now
        self._asked_cpu, self._left, self._batches = 0.0, self._whole, 0
        self._received: float | None = None
        self._last_reading: tuple[int, float] | None = None
        self._next_reading_s = 0.0
        self.is_made, self.is_running = False, True

    def made(self) -> None:
        """Workers of the epoch have been started, or those that were kept have been fed: the loop was held up meanwhile."""
        self.is_made, blocked_s = True, self._clock() - self._begun
        self.tally.waited_s += blocked_s
        self.tally.started_s += blocked_s

    def ask(self) -> None:
        """The loop asks for a batch: its step has ended."""
        self._asked, tally = self._clock(), self.tally
        if self._received is not None:
            step_s, self._received = self._asked - self._received, None
            if step_s <= PAUSE_S or step_s <= PAUSE_STEPS * tally.stepped_s / tally.batches or tally.batches == 1:
                tally.stepped_s += step_s
            if tally.first_look is not None:
                tally.look()
        self._asked_cpu = self._cpu_clock()

    def receive(self, batch: Any) -> None:
        """The loop has a batch."""
        now, tally = self._clock(), self.tally
        self._received = now
        tally.loop_cpu_s += self._cpu_clock() - self._asked_cpu
        tally.waited_s += now - self._asked
        if not self._batches:
            tally.epochs += 1
            tally.started_s += now - self._asked
            tally.measure(batch)
        self._batches += 1
        tally.batches += 1
        if self._left and self._size is not None:
            samples = min(self._size, self._left)
            self._left -= samples
        else:  # torch does not count them out
            samples = samples_in(batch) or self._size or 1
        tally.samples += samples
        if self.workers and now >= self._next_reading_s:
            self._next_reading_s = now + CPU_EVERY_S
            self._read_workers()

    def end(self) -> None:
        """The loop is told that the epoch is over."""
        if self.is_running:
            self.is_running = False
            self.tally.waited_s += self._clock() - self._asked

    def _read_workers(self) -> None:
        """What CPU they took since the last reading; what they took before the first one was their start."""
        cpu_s = sum(_cpu_of(worker.pid) for worker in self.workers)
        if self._last_reading is not None:
            self.tally.worker_batches += self._batches - self._last_reading[0]
            self.tally.worker_cpu_s += cpu_s - self._last_reading[1]
        self._last_reading = self._batches, cpu_s


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process: utime and stime of `/proc/PID/stat`, the 14th and 15th field, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
