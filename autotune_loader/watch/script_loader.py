"""One loader of a script, over all its epochs: what it is, what its loops waited for, and what tunes it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from autotune_loader import LoaderConfig
from autotune_loader.pipeline.loop_log import Log, Site

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first one waits for workers, and the last has no step after it."""
FIRST_LOOK_S, FIRST_LOOK_BATCHES = 10.0, 50
"""After so much training, the sooner of both, something can be said."""


class CpuTimes(NamedTuple):
    """Seconds on a core, and seconds in which something was ready to run and waited for one."""

    cpu_s: float
    queued_s: float


class CpuOfBatches:
    """CPU times of those batches that were clocked."""

    def __init__(self) -> None:
        self.batches = self.cpu_s = self.queued_s = 0.0

    def add(self, batches: float, before: CpuTimes, after: CpuTimes) -> None:
        """So many batches more."""
        self.batches += batches
        self.cpu_s += after.cpu_s - before.cpu_s
        self.queued_s += after.queued_s - before.queued_s

    @property
    def of_one(self) -> CpuTimes | None:
        """The mean; None where none was clocked."""
        return CpuTimes(self.cpu_s / self.batches, self.queued_s / self.batches) if self.batches else None


class ScriptLoader:
    """A loader as people know it: by the line that makes it, however often it is made anew; it is not kept alive.

    Args:
        site: where it is made, and what it reads.
        name: as people read it.
        own: its settings, as the script has them.
        first_look: called now and then, until something can be said of it.
    """

    def __init__(self, site: Site, name: str, own: LoaderConfig, first_look: Callable[[ScriptLoader], None]) -> None:
        self.site, self.name, self.own, self.log = site, name, own, Log()
        self.first_look: Callable[[ScriptLoader], None] | None = first_look
        self.in_loop, self.in_workers = CpuOfBatches(), CpuOfBatches()
        """For making batches, or for receiving them, in the loop's own thread; for making them in torch's workers."""
        self.read_s = self.busy_s = 0.0
        """Seconds in which CPU times were read, and seconds of CPU that this process and torch's workers took meanwhile."""
        self.next_look_s = 0.0
        """When a batch is looked at more closely again, be it of a later epoch."""
        self.batch_bytes: int | None = None
        """Of its first batch."""
        self.epoch_samples: set[int] = set()
        """Of the epochs that were not left early."""
        self.delivered = Counter[int]()
        """Batches of a stream by the number of the worker that made them."""
        self.ahead = 0
        """Batches that a thread took ahead of the training."""
        self.reader: str | None = None
        """The name of the first such thread."""
        self.found: Any = None
        """What tunes it now, and what that has found, without the loader's data; None where nothing does."""
        self._shown: Any = None
        self.kept: Any = None
        """Why nothing tunes it under `run`, a `Finding`."""
        self.settings: tuple[Any, ...] = ()
        """Numbers of the loader that make it another one where the script changes them."""
        self.owner: Callable[[], Any] = lambda: None
        self.dataset: Callable[[], Any] = lambda: None
        self.is_running: Callable[[], bool] = lambda: False
        self.clock = time.monotonic
        self.waiting_since: float | None = None
        """When the batch was asked for that is awaited now."""

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
        now_s = 0.0 if since is None else self.clock() - since
        if not totals.batches:
            return f"the training loop has waited {now_s:.0f} s for its first batch so far"
        if totals.wait_share is None or totals.batches < FEWEST_BATCHES:
            count = "1 batch" if totals.batches == 1 else f"{totals.batches} batches"
            return f"{count} so far; the training loop has waited {totals.waited_s + now_s:.1f} s"
        share = (totals.waited_s + now_s) / (totals.active_s + now_s)
        return f"the training loop waits for data {share * 100:.0f}% of the time"
