"""What training itself has measured: every batch's history, and where the configuration changed.

    requested ── received ── step ── next request = step_end        rows: `BatchTrace`, as those of a burst
                                     no next request in this epoch: the step's end is not known, and the row is left out

A pause in which nobody asks (evaluation, a checkpoint, a notebook left alone) looks like one very long step; `pauses`
tells which steps those are, so that no rate counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace

MOST_BATCHES = 20_000
"""Batches that are remembered at least; twice as many at most (10 MiB)."""
PAUSE_STEPS = 20.0
"""A step of so many typical ones is a pause ..."""
PAUSE_S = 0.5
"""... if it is also so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A pool that was started, or taken up again."""

    batch: int
    """Number of the first batch that was requested afterwards, counted over the loader's life."""
    serves_from: int
    """Number of the first batch that came from it: before it are those that the pool before still had in hand."""
    config: LoaderConfig
    reason: Literal["start", "change", "loss", "epoch"]
    """First pool, a change of configuration, lost workers, or a new epoch of a pool that was not kept."""
    begun: float
    """When the start began, in seconds of the traces' clock."""
    blocked_s: float
    """Seconds for which it held up the training loop."""


class LiveTraces:
    """The log of one loader, over all its epochs."""

    def __init__(self) -> None:
        self._history: list[BatchTrace] = []
        self._forgotten = 0
        self.note = self._history.append
        """Adds a batch."""
        self.changes: list[Change] = []

    @property
    def first(self) -> int:
        """Number of the oldest batch that is remembered."""
        return self._forgotten

    @property
    def end(self) -> int:
        """Number of the batch that will be noted next."""
        return self._forgotten + len(self._history)

    def block(self, first: int, end: int | None = None) -> list[BatchTrace]:
        """The batches from `first` to before `end`, as numbered over the loader's life; those that are remembered."""
        stop = len(self._history) if end is None else max(0, end - self._forgotten)
        return self._history[max(0, first - self._forgotten) : stop]

    def trim(self) -> None:
        """Forget the older half of a log that has grown long."""
        if len(self._history) > 2 * MOST_BATCHES:
            del self._history[:MOST_BATCHES]
            self._forgotten += MOST_BATCHES
            self.changes = self.changes[-MOST_BATCHES:]


def start_s(log: LiveTraces, change: Change) -> float | None:
    """Seconds of training that starting a pool took: held up, and waited for workers that only imported yet; None if unknown.

    A worker that imports takes a core from those that fetch, so that this grows with the number of workers.
    """
    first = log.block(change.serves_from, change.serves_from + 1)
    if not first or change.serves_from < log.first:
        return None
    return change.blocked_s + max(0.0, first[0].wait_s - first[0].service_s)


def continuous(traces: Sequence[BatchTrace], changes: Sequence[Change] = ()) -> list[BatchTrace]:
    """The same batches as if nobody had paused: ends of epochs and pauses are taken out, starts of pools are left in.

    Args:
        traces: batches in their order.
        changes: those of the log; what they held the loop up between two batches is training's own time.
    """
    paused, typical_s = set(pauses(traces)), median([trace.step_s for trace in traces] or [0.0])
    joined, gone_s, before = list[BatchTrace](), 0.0, None
    for position, trace in enumerate(traces):
        if before is not None and trace.requested > before.step_end:
            blocked = [each.blocked_s for each in changes if before.step_end <= each.begun <= trace.requested]
            gone_s += max(0.0, trace.requested - before.step_end - sum(blocked))
        before = trace
        cut_s = trace.step_s - typical_s if position in paused else 0.0
        joined.append(_earlier(trace, gone_s, cut_s) if gone_s or cut_s else trace)
        gone_s += cut_s
    return joined


def _earlier(trace: BatchTrace, by_s: float, cut_s: float) -> BatchTrace:
    return trace._replace(
        fetch_start=trace.fetch_start - by_s,
        fetch_end=trace.fetch_end - by_s,
        collate_end=trace.collate_end - by_s,
        requested=trace.requested - by_s,
        received=trace.received - by_s,
        step_end=trace.step_end - by_s - cut_s,
    )


def pauses(traces: Sequence[BatchTrace]) -> list[int]:
    """Positions of the batches after which nobody asked for a while, which is no slow step."""
    if not traces:
        return []
    longest_s = max(PAUSE_S, PAUSE_STEPS * median(trace.step_s for trace in traces))
    return [position for position, trace in enumerate(traces) if trace.step_s > longest_s]


def step_cores(traces: Sequence[BatchTrace], cpu: Sequence[tuple[float, float]]) -> float:
    """Cores that the step keeps busy: the CPU time of this process, without what fetching in it took.

    Args:
        traces: batches in their order.
        cpu: now and then, the time and seconds of CPU of this process.
    """
    shares = [
        (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(cpu) if after[0] > before[0]
    ]
    whole_s = traces[-1].step_end - traces[0].requested
    fetching_s = sum(trace.cpu_s for trace in traces if trace.worker == MAIN_PROCESS)
    # Receiving keeps this process busy, too: where there is hardly a step it is all that does.
    stepping_s = sum(trace.step_s + trace.receive_s for trace in traces) or whole_s
    return max(0.05, (median(shares) * whole_s - fetching_s) / max(stepping_s, 1e-9)) if shares else 1.0
