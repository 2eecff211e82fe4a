"""The history of one batch. Times are seconds on the machine's monotonic clock, the same in every process of one machine.

worker     fetch_start ── __getitem__ ── fetch_end ── collate ── collate_end
consumer                     requested ──────── wait ──────────────── received ── step ── step_end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAIN_PROCESS = -1
"""`BatchTrace.worker` of a batch that the consumer fetched itself (0 workers)."""


class BatchTrace(NamedTuple):
    """The history of one batch, in the order of delivery; making one takes half a microsecond."""

    worker: int
    """Worker that fetched it, from 0; `MAIN_PROCESS` without workers."""
    fetch_start: float
    """When the worker began to fetch, in seconds."""
    fetch_end: float
    """When the last sample was there and collating began, in seconds."""
    collate_end: float
    """When the batch was whole, in seconds."""
    cpu_s: float
    """CPU seconds of fetch and collate together."""
    samples: int
    """Samples in the batch."""
    requested: float
    """When the training loop asked for the batch, in seconds."""
    received: float
    """When the training loop had it, in seconds."""
    step_end: float
    """When the training step was done, in seconds."""

    @property
    def service_s(self) -> float:
        """Wall seconds that a worker spent on the batch: fetch and collate."""
        return self.collate_end - self.fetch_start

    @property
    def wait_s(self) -> float:
        """Seconds the training loop stood still for the batch, its delivery included."""
        return self.received - self.requested

    @property
    def receive_s(self) -> float:
        """Seconds to hand over a batch that was ready: transport, rebuild, pinning."""
        return self.received - max(self.requested, self.collate_end)

    @property
    def step_s(self) -> float:
        """Seconds of the training step."""
        return self.step_end - self.received


def after_first_of_each(traces: Sequence[BatchTrace]) -> list[BatchTrace]:
    """The batches that were not the first of their worker, which opens files and fills caches."""
    first = {trace.worker: position for position, trace in reversed(list(enumerate(traces)))}
    return [trace for position, trace in enumerate(traces) if first[trace.worker] != position]
