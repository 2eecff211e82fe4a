"""The first batches of a workload, fetched in this process: what they hold and take, and how large those of bursts are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autotune_loader.pipeline.look import moved, positions
from autotune_loader.pipeline.workload import DataSide

# A first batch that took no longer is looked at twice.
SECOND_LOOK_S = 0.5
# A batch that takes longer to fetch is measured with smaller ones, of about SMALLER_FETCH_S: a burst needs several.
SLOW_FETCH_S, SMALLER_FETCH_S = 2.0, 0.5
# Normalisation over a batch needs two samples.
FEWEST_SAMPLES = 2
# Of a dataset that fetches many at once, so many tell what each adds to a call.
FEW_SAMPLES = 3
Batches = Callable[["int | None"], Iterator[Any]]
"""Batches of so many samples with their records; of None as training has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """What is known once one or two batches have been fetched."""

    batch: Any
    samples: int
    first_s: float
    """Wall seconds that the very first took."""
    wall_s: float
    """Wall seconds that one takes, and CPU seconds."""
    cpu_s: float
    at_most: int | None
    """Samples of a batch in bursts, where whole ones take too long."""
    share_of_whole: float
    """How much more than this one a batch of training is."""
    moved_file: str | None
    """One that was open before anything was read: workers would share its position."""


def fetch_first(data: DataSide, batches: Batches) -> FirstBatch:
    """Fetch the batch that the step is warmed up on, and another where that takes no time.

    Raises:
        StopIteration: there is none.
        Exception: whatever the dataset raises.
    """
    places = positions()
    at_most = None if data.is_iterable else _smaller(data, _sample_s(data, batches))
    batch, seen = _fetch_two(batches(at_most))
    if data.is_iterable and not isinstance(data.dataset, Iterator):  # of a stream nobody reads a sample alone
        at_most = _smaller(data, seen[0][0] / max(seen[0][2], 1))
        batch, seen = (batch, seen) if at_most is None else _fetch_two(batches(at_most))
    # A cold file or a busy machine is no habit.
    wall_s, cpu_s, _ = max(seen, key=lambda each: each[1] / max(each[0], 1e-9))
    return FirstBatch(
        batch=batch,
        samples=seen[0][2],
        first_s=seen[0][0],
        wall_s=wall_s,
        cpu_s=cpu_s,
        at_most=at_most,
        share_of_whole=(data.batch_size or 1) / at_most if at_most else 1.0,
        moved_file=moved(places, positions()),
    )


def _smaller(data: DataSide, sample_s: float) -> int | None:
    """Samples of a batch in bursts, if each sample takes so long; None for whole batches."""
    if data.batch_size is None or sample_s * data.batch_size <= SLOW_FETCH_S:
        return None
    size = max(FEWEST_SAMPLES, int(SMALLER_FETCH_S / sample_s))
    return size if size < data.batch_size else None


def _sample_s(data: DataSide, batches: Batches) -> float:
    """Seconds that each sample adds to a batch, where batches might be too slow; else 0."""
    whole, alone = data.batch_size or 1, batches(1)
    if whole <= FEWEST_SAMPLES or (first_s := _seconds_of(alone)) * whole <= SLOW_FETCH_S:
        return 0.0
    warm_s = min(first_s, _seconds_of(alone))  # the first may have opened a file, or imported what decodes it
    if not data.has_batched_fetch:
        return warm_s
    return max(0.0, _seconds_of(batches(FEW_SAMPLES)) - warm_s) / (FEW_SAMPLES - 1)


def _seconds_of(batches: Iterator[Any]) -> float:
    """What the next batch takes."""
    begun = time.monotonic()
    next(batches, None)
    return time.monotonic() - begun


def _fetch_two(batches: Iterator[Any]) -> tuple[Any, list[tuple[float, float, int]]]:
    """The first batch, and of it and the next: wall seconds, CPU seconds, samples."""
    first, seen = None, list[tuple[float, float, int]]()
    while not seen or (len(seen) < 2 and seen[0][0] <= SECOND_LOOK_S):
        begun = time.monotonic()
        try:
            batch, fetch = next(batches)
        except Exception:
            if not seen:
                raise
            break  # the first batch was all there is, or a burst will tell what is wrong
        first = batch if not seen else first
        seen.append((time.monotonic() - begun, fetch[4], fetch[5]))
    return first, seen
