"""What a training loop spent on a loader: batches, samples, and how long it waited, over the whole script."""

from __future__ import annotations

from autotune_loader.live.traces import PAUSE_S, PAUSE_STEPS
from autotune_loader.scripts.gpu_work import GpuWork


class Tally:
    """Counts; told of every request and receipt, in seconds of one clock. Pauses, in which nobody asks, are no steps.

    Args:
        gpu: told of the same stretches; the current CUDA device's where None.
    """

    def __init__(self, gpu: GpuWork | None = None) -> None:
        self.gpu = gpu or GpuWork()
        self.batches = self.samples = self.epochs = 0
        self.waited_s = 0.0
        """Between asking for a batch and having it; workers that were waited for at an epoch's start included."""
        self._began_s = 0.0
        """Of it, until the first batch of each epoch was there."""
        self.stepped_s = 0.0
        """Between having a batch and asking for the next."""
        self.is_under_way = False
        """Whether an epoch has begun that has not ended; also after `break`."""
        self._is_first = True
        self._received: float | None = None

    @property
    def active_s(self) -> float:
        """Seconds of training with this loader."""
        return self.waited_s + self.stepped_s

    @property
    def wait_share(self) -> float | None:
        """Share of them in which the loop waited; None before there was any."""
        return self.waited_s / self.active_s if self.batches and self.active_s > 0 else None

    @property
    def starting_share(self) -> float:
        """Share of them in which the loop waited for epochs to start: for their first batch longer than for another."""
        others = self.batches - self.epochs
        if others <= 0 or self.active_s <= 0:
            return 0.0
        typical_s = (self.waited_s - self._began_s) / others
        return max(0.0, self._began_s - self.epochs * typical_s) / self.active_s

    def begin(self, blocked_s: float) -> None:
        """An epoch begins, whose start held the loop up for so long."""
        self.is_under_way, self._is_first, self._received = True, True, None
        self.epochs += 1
        self.waited_s += blocked_s
        self._began_s += blocked_s

    def ask(self, now: float) -> None:
        """The loop asks for a batch: its step has ended."""
        received = self._received
        if received is None:
            self.gpu.begin(now)
            return
        step_s, self._received = now - received, None
        if step_s <= PAUSE_S or step_s <= PAUSE_STEPS * self.stepped_s / self.batches or self.batches == 1:
            self.stepped_s += step_s
            self.gpu.go_on(now)
        else:
            self.gpu.begin(now)

    def receive(self, asked: float, now: float, samples: int) -> None:
        """The loop has a batch."""
        if not self.is_under_way:  # an iterator that torch began again
            self.begin(0.0)
        if self._is_first:
            self._began_s += now - asked
        self._is_first = False
        self.batches += 1
        self.samples += samples
        self.waited_s += now - asked
        self._received = now

    def end(self, asked: float, now: float) -> None:
        """The loop was told that the epoch is over."""
        self.gpu.end(now)
        self.is_under_way, self._received = False, None
        self.waited_s += now - asked
