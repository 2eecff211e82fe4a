"""What the cores allow, if everything else cost nothing: an optimistic bound, no prediction. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from autotune_loader.values.measurement import Measurement
from autotune_loader.values.trace import BatchTrace, after_first_of_each

MIN_BATCHES = 4
"""Fewer batches say nothing of a mean."""


def cpu_limit(bursts: Sequence[Measurement], usable_cores: float, steps: Iterable[Measurement] = ()) -> float | None:
    """Samples/s: cores over the CPU seconds that a batch needs at least, for its fetch and for a step that computes here.

    A worker's CPU seconds grow when the machine is crowded, and a step's with its threads; the smallest of each is taken,
    so that this stays a limit.

    Args:
        bursts: traced bursts of any configurations.
        usable_cores: cores that workers and step share.
        steps: the step on a cached batch with any number of threads; none for a step on an accelerator.

    Returns:
        The limit; None where no burst carries traces.

    Example: decoding takes 50 ms of CPU and a step of one thread 57 ms, on 4 cores: 107 / 4 = 27 ms a batch.
    """
    fetches = [(fmean(trace.cpu_s for trace in warm(each.traces)), each.batch_size) for each in bursts if each.traces]
    if not fetches:
        return None
    fetch_s, batch_size = min(fetches, key=lambda each: each[0] / each[1])
    # Threads that spin while they wait for one another count: they keep a core from the workers all the same.
    step_s = [
        each.cpu_share * usable_cores * each.batch_size / each.samples_per_s.value for each in steps if each.cpu_share
    ]
    return usable_cores * batch_size / max(fetch_s + min(step_s, default=0.0), 1e-12)


def warm(traces: Sequence[BatchTrace]) -> list[BatchTrace]:
    """The batches that were not the first of their worker, where there are enough of them."""
    later = [traces[position] for position in after_first_of_each(traces)]
    return later if len(later) >= MIN_BATCHES else list(traces)
