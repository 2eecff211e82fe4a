"""What each resource allows on its own: named limits with intervals, of which the smallest binds. Pure maths.

    step       a cached batch stepped again and again          pinning   one thread copies into page-locked memory
    cpu        cores over CPU seconds of fetch and step        h2d       the copy to the device
    transport  a batch taken over from a worker                storage   what only the first touch of a sample waits for
    in_process fetch and step by turns, without workers: what is left where transport costs more than it gains

A limit is optimistic: it is what would be reached if everything else cost nothing. So none is a prediction (that is the
twin's business), and no configuration exceeds the smallest of them by more than its interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval, gap_to_ceiling, mean_interval
from autotune_loader.values.trace import BatchTrace, after_first_of_each

LimitName = Literal["step", "cpu", "transport", "storage", "h2d", "pinning", "in_process"]
REACHED_SHARE = 0.98
"""A limit is reached when the rate's lower bound comes this close to it: what remains is not worth a search."""
RECEIPT_SHARE = 0.05
"""A step is the bottleneck, rather than the transport of its batches, when taking one over costs less than this of it."""
CPU_TICK_S = 0.01
"""The kernel counts a process's CPU time in ticks; a share over a short window is not known better."""
MIN_BATCHES = 4
"""Fewer batches in common say nothing about a difference between two touches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The rate that one resource allows on its own."""

    name: LimitName
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
    return _per_second(mean_interval([trace.step_s for trace in _warm(measured.traces)]), measured.batch_size)


def step_cpu_s(on_a_cached_batch: Measurement, usable_cores: float) -> float | None:
    """CPU seconds of one step, all its threads together; None where CPU use was not measured.

    Threads that spin while they wait for one another count: they keep a core from the workers all the same.
    """
    share = on_a_cached_batch.cpu_share
    if share is None:
        return None
    batches_per_s = on_a_cached_batch.samples_per_s.value / on_a_cached_batch.batch_size
    return share * usable_cores / batches_per_s


def cpu_limit(bursts: Sequence[Measurement], usable_cores: float, steps: Iterable[Measurement] = ()) -> Limit | None:
    """Cores over the CPU seconds that a batch needs at least: its fetch, and its step where that computes here.

    A worker's CPU seconds grow when the machine is crowded, and a step's with its threads; the least of each is taken,
    so that this stays a limit.

    Args:
        bursts: traced bursts of any configurations.
        usable_cores: cores that workers and step share.
        steps: the step on a cached batch with any number of threads; none for a step on an accelerator.

    Returns:
        The limit; None where no burst carries traces.

    Example: decoding takes 50 ms of CPU and a step of one thread 57 ms, on 4 cores: 107 / 4 = 27 ms a batch.
    """
    fetches = [(mean_interval([trace.cpu_s for trace in _warm(m.traces)]), m.batch_size) for m in bursts if m.traces]
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
    because = f"a batch takes {fetch.value * 1e3:.3g} ms of CPU to fetch and {step * 1e3:.3g} ms to step on"
    return Limit(
        name="cpu",
        samples_per_s=_per_second(per_batch, batch_size * usable_cores),
        because=f"{because}, on {usable_cores:g} cores",
    )


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
    return Limit(
        name="transport", samples_per_s=_per_second(seconds, nothing_but_transport.batch_size), because=because
    )


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
    rate = _per_second(seconds, first_touch.batch_size * max(1, workers))
    return Limit(name="storage", samples_per_s=rate, because=f"{because}, with {max(1, workers)} workers")


def pinning_limit(batch_bytes: int, batch_size: float, bytes_per_s: Interval) -> Limit:
    """One thread copies every batch into page-locked memory."""
    return _copy_limit("pinning", "copies into page-locked memory", batch_bytes, batch_size, bytes_per_s)


def h2d_limit(batch_bytes: int, batch_size: float, bytes_per_s: Interval) -> Limit:
    """Every batch crosses the bus to the device; `bytes_per_s` is for pinned or pageable memory, whichever is used."""
    return _copy_limit("h2d", "copies to the device", batch_bytes, batch_size, bytes_per_s)


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


def gap_to(limit: Limit, rate: Interval) -> Interval:
    """Share of a limit that a measured rate leaves unused, with its interval."""
    return gap_to_ceiling(rate, limit.samples_per_s)


def is_reached(limit: Limit, rate: Interval) -> bool:
    """Whether a measured rate is, to 97.5 % confidence, as good as this limit allows."""
    return rate.low >= REACHED_SHARE * limit.samples_per_s.value


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
    waiting = mean_interval([max(0.0, trace.collate_end - trace.requested) for trace in _warm(measured.traces)])
    received_s = sorted(trace.receive_s for trace in _warm(measured.traces))[len(_warm(measured.traces)) // 2]
    period_s = measured.step_s + received_s
    # The burst's own share knows of waits to come, when the batches that were ready at the start are used up.
    to_come_s = measured.wait_share * period_s - measured.receive_s
    is_fed = max(waiting.high, to_come_s) <= (1 - REACHED_SHARE) * period_s
    slower_s = measured.step_s - on_a_cached_batch.step_s
    is_undisturbed = slower_s <= _step_error_s(on_a_cached_batch, measured)
    return is_fed and is_undisturbed and received_s <= RECEIPT_SHARE * measured.step_s


def _step_error_s(on_a_cached_batch: Measurement, measured: Measurement) -> float:
    """Seconds by which the step may be slower beside workers and still be called undisturbed."""
    free = (1 - REACHED_SHARE) * on_a_cached_batch.step_s
    if len(measured.traces) < MIN_BATCHES:
        return free
    seen = mean_interval([trace.step_s for trace in measured.traces[1:]])
    return max(free, seen.high - seen.value)


def by_name(limits: Iterable[Limit]) -> Mapping[LimitName, Limit]:
    """The limits by name, the smallest first; of two with one name the smaller."""
    ordered = sorted(limits, key=lambda limit: -limit.samples_per_s.value)
    return dict(reversed([(limit.name, limit) for limit in {each.name: each for each in ordered}.values()]))


def _copy_limit(name: LimitName, what: str, batch_bytes: int, batch_size: float, bytes_per_s: Interval) -> Limit:
    per_batch = batch_bytes / batch_size
    rate = replace(
        bytes_per_s,
        value=bytes_per_s.value / per_batch,
        low=bytes_per_s.low / per_batch,
        high=bytes_per_s.high / per_batch,
    )
    return Limit(name=name, samples_per_s=rate, because=f"{what} run at {bytes_per_s.value / 1e9:.3g} GB/s")


def _per_second(seconds: Interval, samples: float) -> Interval:
    """Rate of an interval of seconds per `samples`; a lower end of no seconds bounds nothing."""
    value = samples / max(seconds.value, 1e-12)
    return Interval(
        value=value,
        low=samples / seconds.high if seconds.high > 0 else value,
        high=samples / seconds.low if seconds.low > 0 else math.inf,
        count=seconds.count,
    )


def _warm(traces: Sequence[BatchTrace]) -> list[BatchTrace]:
    """The batches that were not the first of their worker, where there are enough of them."""
    warm = [traces[position] for position in after_first_of_each(traces)]
    return warm if len(warm) >= MIN_BATCHES else list(traces)


def _waiting_s(trace: BatchTrace) -> float:
    return trace.service_s - trace.cpu_s
