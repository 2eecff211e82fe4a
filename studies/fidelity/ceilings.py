"""What each resource allows on its own: named limits with intervals, of which the smallest binds. Pure functions.

    step       a cached batch stepped again and again          storage   what only the first touch of a sample waits for
    cpu        cores over CPU seconds of fetch and step        in_process   fetch and step by turns, without workers
    transport  a batch taken over from a worker

A limit is optimistic: it is what would be reached if everything else cost nothing. So none is a prediction (that is the
twin's business), and no configuration exceeds the smallest of them by more than its interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune_loader.report.advice import limits
from autotune_loader.report.advice.limits import MIN_BATCHES, per_second, warm
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval, mean_interval
from autotune_loader.values.trace import BatchTrace

REACHED_SHARE = 0.98
"""A step is as fast as alone, and never waits, when this share of its rate and time is left: the rest is noise."""
RECEIPT_SHARE = 0.05
"""A step is the bottleneck, rather than the transport of its batches, when taking one over costs less than this of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The rate that one resource allows on its own."""

    name: Literal["step", "cpu", "transport", "storage", "in_process"]
    samples_per_s: Interval
    because: str
    """The measured quantity behind it, for a person."""


def step_limit(on_a_cached_batch: Measurement) -> Limit:
    """No loader makes the training step faster than it is on a batch that is already there."""
    step_ms = on_a_cached_batch.step_s * 1e3
    return Limit(
        name="step",
        samples_per_s=on_a_cached_batch.samples_per_s,
        because=f"a step takes {step_ms:.3g} ms on a cached batch",
    )


def step_beside(measured: Measurement) -> Interval:
    """Samples per second of the step alone while a burst's workers are busy: no limit, but what they cost the step.

    Args:
        measured: a traced burst, best one with as many workers as there are cores.

    Raises:
        ValueError: the burst carries no traces.
    """
    if not measured.traces:
        raise ValueError("the burst has no traces; one that was just measured has them")
    return per_second(mean_interval([trace.step_s for trace in warm(measured.traces)]), measured.batch_size)


def cpu_limit(bursts: Sequence[Measurement], usable_cores: float, steps: Iterable[Measurement] = ()) -> Limit | None:
    """What the advice of the package rests on; see there."""
    rate = limits.cpu_limit(bursts, usable_cores, steps)
    because = f"CPU seconds of fetch and step, on {usable_cores:g} cores"
    return None if rate is None else Limit(name="cpu", samples_per_s=rate, because=because)


def transport_limit(nothing_but_transport: Measurement) -> Limit | None:
    """The rate at which the training loop takes ready batches over, whatever the number of workers.

    Args:
        nothing_but_transport: a burst of batches of the same bytes that cost nothing to make, or any burst in which
            batches lay ready: only those tell.

    Returns:
        The limit; None where fewer than `MIN_BATCHES` batches were ready when they were asked for.
    """
    ready = [t.receive_s for t in nothing_but_transport.traces[1:] if t.collate_end <= t.requested]
    if len(ready) < MIN_BATCHES:
        return None
    seconds = mean_interval(ready)
    megabytes = nothing_but_transport.batch_bytes / 1e6
    because = f"taking over a batch of {megabytes:.3g} MB takes {seconds.value * 1e3:.3g} ms"
    return Limit(name="transport", samples_per_s=per_second(seconds, nothing_but_transport.batch_size), because=because)


def storage_limit(first_touch: Measurement, second_touch: Measurement, workers: int) -> Limit | None:
    """What storage delivers to so many workers at once, from what the first touch of a sample waits for longer.

    Both bursts read the same batches in the same order (equal seeds), so they are compared batch by batch; what CPU
    seconds explain is no storage. More workers keep more requests under way, and may get more out of the same storage.

    Args:
        first_touch: burst on samples that nothing has read before.
        second_touch: the next burst on the same samples, from the page cache as far as they fit.
        workers: worker processes of both, at least 1.

    Returns:
        The limit; None where the first touch did not wait measurably longer, or where too few batches are in common.
    """
    pairs = list(zip(first_touch.traces, second_touch.traces, strict=False))[max(1, workers) :]
    if len(pairs) < MIN_BATCHES:
        return None
    longer = [_waiting_s(first) - _waiting_s(second) for first, second in pairs]
    seconds = mean_interval(longer)
    if seconds.low <= 0:
        return None
    because = f"a batch waits {seconds.value * 1e3:.3g} ms longer when it is read for the first time"
    rate = per_second(seconds, first_touch.batch_size * max(1, workers))
    return Limit(name="storage", samples_per_s=rate, because=f"{because}, with {max(1, workers)} workers")


def in_process_limit(without_workers: Measurement) -> Limit:
    """The rate without workers, where nothing is transported and nothing overlaps: measured, not bounded."""
    because = f"without workers a batch takes {without_workers.service_s * 1e3:.3g} ms, then comes its step"
    return Limit(name="in_process", samples_per_s=without_workers.samples_per_s, because=because)


def binding(limits: Iterable[Limit]) -> Limit:
    """The smallest limit: the resource that a faster loader runs into first.

    `in_process` is no limit to workers but the alternative to them: it is the answer where it exceeds the others.

    Raises:
        ValueError: there are no limits.
    """
    known = list(limits)
    if not known:
        raise ValueError("limits is empty; step_limit() of a cached batch is the easiest to have")
    alone = [limit for limit in known if limit.name == "in_process"]
    others = [limit for limit in known if limit.name != "in_process"]
    smallest = sorted(others, key=lambda limit: limit.samples_per_s.value)[:1]
    return max(alone + smallest, key=lambda limit: limit.samples_per_s.value)


def is_compute_bound(on_a_cached_batch: Measurement, measured: Measurement) -> bool:
    """Whether the step alone sets the rate, so that no loader can make the job faster.

    Three things are looked at apart, because the step's own irregularity, which hides a few percent in the rate of a short
    burst, hides nothing in them: the loop hardly ever waits for a batch that is not made yet, taking ready batches over
    costs little beside the step, and the step is not slower than alone. One burst of a second or less is enough.

    Args:
        on_a_cached_batch: the step's ceiling.
        measured: a traced burst of any configuration.
    """
    if not measured.traces:
        return False
    waiting = mean_interval([max(0.0, trace.collate_end - trace.requested) for trace in warm(measured.traces)])
    received_s = sorted(trace.receive_s for trace in warm(measured.traces))[len(warm(measured.traces)) // 2]
    period_s = measured.step_s + received_s
    # The burst's own share knows of waits to come, when the batches that were ready at the start are used up.
    to_come_s = measured.wait_share * period_s - measured.receive_s
    never_waits = max(waiting.high, to_come_s) <= (1 - REACHED_SHARE) * period_s
    slower_s = measured.step_s - on_a_cached_batch.step_s
    is_undisturbed = slower_s <= _step_error_s(on_a_cached_batch, measured)
    return never_waits and is_undisturbed and received_s <= RECEIPT_SHARE * measured.step_s


def _step_error_s(on_a_cached_batch: Measurement, measured: Measurement) -> float:
    """Seconds by which the step may be slower beside workers and still be called undisturbed."""
    free = (1 - REACHED_SHARE) * on_a_cached_batch.step_s
    if len(measured.traces) < MIN_BATCHES:
        return free
    seen = mean_interval([trace.step_s for trace in measured.traces[1:]])
    return max(free, seen.high - seen.value)


def _waiting_s(trace: BatchTrace) -> float:
    return trace.service_s - trace.cpu_s
