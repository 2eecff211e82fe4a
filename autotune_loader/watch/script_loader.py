"""One loader of a script, over all its epochs: what it is, what its loops waited for, and what runs in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autotune_loader import LoaderConfig
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.pipeline.site import Site

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
        first_look: called once, when something can be said of it.
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
        self.shape: BatchShape | None = None
        """Of its first batch."""
        self.found: Any = None
        """What the latest AutoLoader in its place has found, without its data; None where there was none."""
        self.kept: Any = None
        """Why no AutoLoader takes its place under `run`, a `Finding`; None where one does."""
        self.settings: tuple[Any, ...] = ()
        """Attributes of the loader that make it another one where they are changed."""
        self.owner: Callable[[], Any] = lambda: None
        self.is_running: Callable[[], bool] = lambda: False

    def __str__(self) -> str:
        """What its loops wait."""
        share = self.log.totals.wait_share
        return "no step could be timed" if share is None else f"the loop waits {share * 100:.0f} % of its time"

    def is_free_for(self, loader: Any) -> bool:
        """Whether it is this loader, or one that is gone, with all of its iterators, and whose place this one takes."""
        owner = self.owner()
        return owner is loader or (owner is None and not self.is_running())

    def look(self) -> None:
        """Something may be said by now."""
        totals = self.log.totals
        is_long = totals.active_s >= FIRST_LOOK_S and totals.batches >= FEWEST_BATCHES
        if (is_long or totals.batches >= FIRST_LOOK_BATCHES) and self.first_look is not None:
            first_look, self.first_look = self.first_look, None
            first_look(self)
