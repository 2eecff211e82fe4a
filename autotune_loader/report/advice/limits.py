"""What the cores allow, if everything else cost nothing: an optimistic bound, no prediction. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval, mean_interval
from autotune_loader.values.trace import BatchTrace, after_first_of_each

CPU_TICK_S = 0.01
"""The kernel counts a process's CPU time in ticks; a share over a short window is not known better."""
MIN_BATCHES = 4
"""Fewer batches say nothing of a mean."""


def step_cpu_s(on_a_cached_batch: Measurement, usable_cores: float) -> float | None:
    """CPU seconds of one step, all its threads together; None where CPU use was not measured.

    Threads that spin while they wait for one another count: they keep a core from the workers all the same.
    """
    share = on_a_cached_batch.cpu_share
    if share is None:
        return None
    batches_per_s = on_a_cached_batch.samples_per_s.value / on_a_cached_batch.batch_size
    return share * usable_cores / batches_per_s


def cpu_limit(bursts: Sequence[Measurement], usable_cores: float, steps: Iterable[Measurement] = ()) -> Interval | None:
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
    fetches = [(mean_interval([trace.cpu_s for trace in warm(m.traces)]), m.batch_size) for m in bursts if m.traces]
    if not fetches:
        return None
    fetch, batch_size = min(fetches, key=lambda each: each[0].value / each[1])
    stepped = [(seconds, m) for m in steps if (seconds := step_cpu_s(m, usable_cores)) is not None]
    step, error = 0.0, 0.0
    if stepped:
        step, cheapest = min(stepped, key=lambda each: each[0])
        error = CPU_TICK_S / cheapest.window_s * step / max(cheapest.cpu_share or 0.0, 1e-9) / usable_cores
    per_batch = Interval(
        value=fetch.value + step, low=fetch.low + step - error, high=fetch.high + step + error, count=fetch.count
    )
    return per_second(per_batch, batch_size * usable_cores)


def per_second(seconds: Interval, samples: float) -> Interval:
    """Rate of an interval of seconds per `samples`; a lower end of no seconds bounds nothing."""
    value = samples / max(seconds.value, 1e-12)
    return Interval(
        value=value,
        low=samples / seconds.high if seconds.high > 0 else value,
        high=samples / seconds.low if seconds.low > 0 else math.inf,
        count=seconds.count,
    )


def warm(traces: Sequence[BatchTrace]) -> list[BatchTrace]:
    """The batches that were not the first of their worker, where there are enough of them."""
    later = [traces[position] for position in after_first_of_each(traces)]
    return later if len(later) >= MIN_BATCHES else list(traces)
