"""The batches of a running burst: noted in a fraction of a microsecond, and made into traces only when looked at.

Making a `BatchTrace` takes about 1 us, as much as all the rest of tracing; a running burst looks at few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from autotune_loader.pipeline.stage_clock import Report
from autotune_loader.values.trace import BatchTrace

Fetch = tuple[int, float, float, float, float, int] | tuple[int, float, float, float, float, int, Report]
"""worker, fetch_start, fetch_end, collate_end, cpu_s, samples; and now and then what clocks in the worker have seen"""
REPORTED = 7
"""Figures of a fetch that carries what clocks have seen, as its last one."""


class History(Sequence[BatchTrace]):
    """A burst's traces in the order of delivery, as far as it has come.

    Attributes:
        note: adds a batch, given as (fetch, requested, received, step_end). It is the list's own `append`; the garbage
            collector soon forgets tuples of numbers, so a long record does not slow the loop down either.
    """

    __slots__ = ("_rows", "note")

    def __init__(self) -> None:
        self._rows: list[BatchTrace | tuple[Fetch, float, float, float]] = []
        self.note = self._rows.append

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> BatchTrace: ...
    @overload
    def __getitem__(self, index: slice) -> list[BatchTrace]: ...
    def __getitem__(self, index: int | slice) -> BatchTrace | list[BatchTrace]:
        if isinstance(index, slice):
            return [self._trace(i) for i in range(*index.indices(len(self._rows)))]
        return self._trace(index)

    def forget(self, count: int) -> None:
        """Drop the oldest batches, so that a log of weeks stays small."""
        del self._rows[:count]

    def _trace(self, index: int) -> BatchTrace:
        row = self._rows[index]
        if isinstance(row, BatchTrace):
            return row
        fetch, requested, received, step_end = row
        worker, fetch_start, fetch_end, collate_end, cpu_s, samples = fetch[:6]
        trace = BatchTrace(
            worker=worker,
            fetch_start=fetch_start,
            fetch_end=fetch_end,
            collate_end=collate_end,
            cpu_s=cpu_s,
            requested=requested,
            received=received,
            step_end=step_end,
            samples=samples,
        )
        self._rows[index] = trace
        return trace
