"""Batches whose slow fetch was cut short, as they would have been: the loop that their workers would feed.

seen       fetch ▓▓ (2 of 16 samples)      step
as whole   fetch ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓          step       worker after worker, for some rounds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace

ROUNDS = 4
"""Of the workers: as many as a window needs."""
PREFETCH = 2
"""Batches that a worker makes before the loop has taken its first; such slow ones hardly ever lie ready."""


def are_cut_short(traces: Sequence[BatchTrace]) -> bool:
    return any(trace.unread_s for trace in traces)


def as_whole(traces: Sequence[BatchTrace], workers: int) -> list[BatchTrace]:
    """The batches of a loop like the one that was seen, each with all of its samples; as seen, where none was cut short.

    Args:
        traces: every batch, in the order of delivery.
        workers: worker processes; 0 where the loop fetched.
    """
    if not are_cut_short(traces):
        return list(traces)
    crew = max(workers, 1)
    free = [min(trace.fetch_start for trace in traces)] * crew
    now, whole = traces[0].requested, list[BatchTrace]()
    for number in range(ROUNDS * crew + 1):
        seen, worker = traces[number % len(traces)], number % crew
        begun = free[worker] if workers else now
        if number >= PREFETCH * crew:
            begun = max(begun, whole[number - PREFETCH * crew].received)
        fetched = begun + seen.fetch_end - seen.fetch_start + seen.unread_s
        ready = fetched + seen.collate_end - seen.fetch_end
        received = max(ready, now) + max(0.0, seen.receive_s)
        whole.append(
            replace(
                seen,
                worker=worker if workers else MAIN_PROCESS,
                fetch_start=begun,
                fetch_end=fetched,
                collate_end=ready,
                cpu_s=seen.cpu_s * (ready - begun) / max(seen.service_s, 1e-9),
                requested=now,
                received=received,
                step_end=received + seen.step_s,
                unread_s=0.0,
            )
        )
        free[worker], now = ready, whole[-1].step_end
    return whole
