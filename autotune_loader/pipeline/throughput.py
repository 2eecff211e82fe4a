"""From the histories of a burst's batches to what the burst measured: pure functions of `BatchTrace` series.

    iterator        round 1 of the workers      window ────────────────────────────────────────────┐
    created ── start-up ── W batches delivered ──┤ consumed: step_end to step_end, every W-th end averaged
                           batches already made ─┘ at the opening: stock, which flatters what is consumed

A burst is short and a queue is deep: what the loop consumes at first may have been made while nobody was looking. In the long
run nobody consumes more than is made. So without stock at the opening the rate is what was consumed; with stock it is what was
consumed after the first stall, which shows that the stock is gone; and while it lasts it is at most what the workers make
without pausing. Nothing is assumed about how long queues are or how service times are distributed.

Batches of seconds come in waves, of which a burst does not wait for three. What it consumed then tells nothing: the rate is
the lower of what the workers make and what the loop could take, by the batches that there are, be they the workers' first.

Where a thread pins batches, it locks the pages of some for the first time, which training does once: `once_locked` takes the
histories to where it is done.

Where loader and step are in balance and service times irregular, a window of a few rounds from empty queues reads low
(simulated: up to 11% at a variation of 30%, 2% at 5%).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from autotune_loader.values import BatchTrace, BurstPlan, Interval, Measurement, after_first_of_each
from autotune_loader.values.statistics import Z_95, correlated_mean_interval, mean_interval, student_t_quantile

MAX_POINTS = 512
"""Times a running burst looks at when it asks for its error; more batches are taken in groups, to stay cheap."""
HOLDING_UP = 0.9
"""Workers that make less than this share of what the loop could take hold it up."""
MADE_SD = 0.05
"""What the workers are said to make leaves things out, such as slow batches that hold up the others: so much, relatively."""
FIRST_LOCKING = 3.0
"""Torch's allocator locks the pages of a block once and keeps it. What takes more than so many times the median is taken for
that (H200: 55 ms for 38.5 MB, 8 ms for a later copy into them)."""
FEW_LATE = 2
"""So many batches, or a quarter of those that take long to pin, may do so in the later half of a burst for new pages."""
RUNS, MOST_FOR_RUNS_S = 2, 3.0
"""A window of whole runs has seen as many loads of a shard, wherever it begins. No burst is longer for their sake."""
SLOWER_BY_CHANCE = 0.01
"""So seldom is a worker taken for slower than the others that is not."""


def summarise(traces: Sequence[BatchTrace], *, workers: int, started: float) -> Measurement:
    """What a burst measured, its rate sustained however full the queues were at the opening.

    Needs all batches (two at least) from the very first, and when the iterator was created, on their clock.
    """
    if len(traces) < 2:
        raise ValueError(f"{len(traces)} batches do not make a window; a burst needs at least 2")
    traces = once_locked(traces)
    first, stock = _open(traces, workers)
    inside = traces[first:]
    window_s = inside[-1].step_end - traces[first - 1].step_end
    rate = _sustained(traces, workers, first, stock)
    return Measurement.of(
        inside,
        rate,
        window_s=window_s,
        # A batch that lay ready when it was first asked for was there before.
        first_batch_s=traces[0].ready - started + traces[0].receive_s,
        # Summed up over a short window instead, waiting depends on how full the queues were when it opened.
        wait_share=1 - rate.value * sum(trace.step_s for trace in inside) / sum(trace.samples for trace in inside),
    )


def once_locked(traces: Sequence[BatchTrace]) -> Sequence[BatchTrace]:
    """The histories as they are once no pages are to be locked: a batch whose pinning locked some is pinned like the others.

    Workers make batches when they did; the thread takes them in the same order, and so does the loop, each as soon as it can.
    """
    if traces[0].pin_end is None:  # no thread pins
        return traces
    usual_s, order = median([trace.pin_s for trace in traces]), sorted(traces, key=lambda trace: trace.ready)
    long = [place for place, trace in enumerate(order) if trace.pin_s > FIRST_LOCKING * usual_s]
    if not long or not _lock_pages(order, long):
        return traces
    pinned, was, free = dict[float, tuple[float, float]](), -math.inf, -math.inf
    for trace in order:
        begun = max(trace.collate_end, free) + trace.ready - trace.pin_s - max(trace.collate_end, was)
        free = begun + (trace.pin_s if trace.pin_s <= FIRST_LOCKING * usual_s else usual_s)
        pinned[trace.ready], was = (begun, free), trace.ready
    found, was, free = list[BatchTrace](), traces[0].requested, traces[0].requested
    for trace in traces:
        begun, end = pinned[trace.ready]
        requested = free + trace.requested - was
        received = max(requested, end) + trace.receive_s
        was, free = trace.step_end, received + trace.step_s
        found.append(
            trace._replace(requested=requested, received=received, step_end=free, pin_start=begun, pin_end=end)
        )
    return found


def _lock_pages(order: Sequence[BatchTrace], long: Sequence[int]) -> bool:
    """Whether the pinnings at these places, in the order of the thread, lock pages; else batches differ, and some are large.

    Pages are locked early, and most of them while more batches are in use than ever before.
    """
    if sum(place > len(order) / 2 for place in long) <= max(FEW_LATE, len(long) / 4):
        return True
    step_ends = sorted(trace.step_end for trace in order)
    in_use = [n - bisect.bisect(step_ends, trace.ready - trace.pin_s) for n, trace in enumerate(order)]
    return sum(in_use[place] > max(in_use[:place], default=-1) for place in long) > len(long) / 2


def queued_share(traces: Sequence[BatchTrace], *, workers: int) -> float:
    """Share of what the workers made in the window that went into their queues; negative where more came out of them.

    Batches that lie ready for longer and longer are ever more (Little's law): by the growth of that time over the window.
    """
    inside = traces[_open(traces, workers)[0] :] if workers and len(traces) > 1 else ()
    if not workers or len(inside) < 2 * workers:
        return 0.0
    first, last = inside[:workers], inside[-workers:]
    grown_s = fmean(trace.received - trace.collate_end for trace in last)
    grown_s -= fmean(trace.received - trace.collate_end for trace in first)
    return grown_s / (fmean(trace.step_end for trace in last) - fmean(trace.step_end for trace in first))


def relative_error(traces: Sequence[BatchTrace], *, workers: int) -> float | None:
    """Half-width of the rate's 95% interval relative to the rate, of two batches or more; None while these say too little.

    Cheap enough to ask every 50 ms of a running burst. It stays None while stock is being used up that the workers
    cannot replace as fast, because the true rate has then not been seen yet.
    """
    first, stock = _open(traces, workers)
    count = len(traces) - first
    if count < max(8, 4 * workers):  # too few batches, or rounds of workers that deliver in bursts, to judge by
        return None
    consumed = _consumed(traces, workers, first)
    if stock == "left" and _made_at_best(traces[-MAX_POINTS:], workers).value < consumed.value:
        return None
    error = (consumed.high - consumed.low) / 2 / consumed.value
    return error if math.isfinite(error) else None


def is_enough(
    traces: Sequence[BatchTrace], plan: BurstPlan, *, delivered: int, workers: int, now: float, run: int = 0
) -> bool:
    """Whether a running burst may stop: its rate is known well enough, or its time is up before the next batch can come.

    More batches may be `delivered` than there are traces. Each `run` of them may begin with one that takes long.
    """
    elapsed = now - traces[0].received
    # The first round of the workers only opens the window, and one alone is mostly edges.
    if len(traces) <= 3 * max(1, workers):
        service_s, due, longest_s = fmean(trace.service_s for trace in traces), now, 3.0 * plan.max_s
        if workers:
            comes_again = service_s <= 2.0 * plan.max_s  # the second round, half a service after `max_s` at the latest
            longest_s = plan.max_s + (service_s / 2 if comes_again else 0.0)
        if run:
            longest_s = max(longest_s, MOST_FOR_RUNS_S)
        if delivered >= workers:
            due = traces[min(delivered - workers, len(traces) - 1)].collate_end + service_s
        return max(now, due) - traces[0].received >= longest_s
    inside = len(traces) - max(1, workers)
    runs = RUNS if elapsed * RUNS * run < MOST_FOR_RUNS_S * inside else 1
    if inside < runs * run and elapsed < MOST_FOR_RUNS_S:
        return False
    if elapsed < plan.min_s:
        return False
    if elapsed >= plan.max_s:
        return True
    error = relative_error(traces, workers=workers)
    return error is not None and error <= plan.relative_error


def _sustained(traces: Sequence[BatchTrace], workers: int, first: int, stock: str) -> Interval:
    """The rate; while there is stock, that of workers which will hold the loop up once it is gone."""
    rate = _consumed(traces, workers, first)
    if not workers:
        return rate
    made, inside = _made_at_best(traces, workers), traces[first:]
    if len(inside) < 2 * workers:
        # What was consumed depends on where in a round the window was cut; what either side needs for a batch does not.
        # The first is handed over while workers still start.
        consumer = mean_interval([_taken_s(trace) for trace in traces[1:]])
        taken = _rate(consumer, fmean(trace.samples for trace in traces), len(traces))
        slower = min(made, taken, key=lambda each: each.value)
        factor = math.exp(math.hypot(math.log(slower.high / slower.value), Z_95 * MADE_SD))
        return replace(slower, low=slower.value / factor, high=slower.value * factor, count=rate.count)
    if stock == "left" and made.value < rate.value:
        return replace(made, count=rate.count)
    consumer_s = fmean(_taken_s(trace) for trace in inside)
    if made.value * consumer_s > HOLDING_UP * fmean(trace.samples for trace in inside):
        return rate
    if stock == "none":
        made = _made(traces, workers, fmean(_pauses_s(traces, since=inside[0].requested)))
    return _middle(rate, made)


def _taken_s(trace: BatchTrace) -> float:
    """Seconds in which a batch that is whole is taken, by the slower of the loop and the thread that pins beside it."""
    return max(trace.pin_s, trace.receive_s + trace.step_s)


def _middle(consumed: Interval, made: Interval) -> Interval:
    """Where the workers hold the loop up, what they make is what is consumed in the long run.

    What is consumed knows no batches in the making, and what is made none that wait for an earlier one: their middle errs half
    as much in windows of 1 to 5 rounds (3% instead of 6% with 32 workers). Its interval is that of both by their precision.
    """
    sds = [math.log(each.high / each.value) / Z_95 for each in (consumed, made)]
    half = Z_95 / math.hypot(1 / max(sds[0], 1e-6), 1 / math.hypot(sds[1], MADE_SD))
    value = math.sqrt(consumed.value * made.value)
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half), count=consumed.count)


def _open(traces: Sequence[BatchTrace], workers: int) -> tuple[int, Literal["none", "spent", "left"]]:
    """The window's first batch, after every worker's first and the stock, if enough follows; and what became of the stock."""
    first = max(1, min(workers, len(traces) // 2))
    if workers == 0 or traces[first].collate_end > traces[first - 1].step_end:
        # The next to be delivered was not ready, so the loop had to wait: nothing flatters the rate.
        return first, "none"
    enough = max(12, 3 * workers)  # what follows the stock must be more than edges
    for index in range(first + 1, len(traces) - enough):
        if traces[index].collate_end > traces[index].requested:
            return index + 1, "spent"
    return first, "left"


def _consumed(traces: Sequence[BatchTrace], workers: int, first: int) -> Interval:
    """Samples/s from step_end to step_end, from batch `first` on."""
    round_ = max(workers, 1)
    count = len(traces) - first
    stride = 1 if count <= MAX_POINTS else round_ * math.ceil(count / MAX_POINTS / round_)
    ends, sizes = traces[first - 1 :: stride], [trace.samples for trace in traces[first::stride]]
    seconds = [after.step_end - before.step_end for before, after in pairwise(ends)]
    # With strides of whole rounds the bursts of W no longer show.
    return _rate(correlated_mean_interval(seconds, round_ if stride == 1 else 1), fmean(sizes) * stride, count)


def _made_at_best(traces: Sequence[BatchTrace], workers: int) -> Interval:
    """Samples/s that are made ready while workers have orders, idling excluded.

    Idling only adds to a pause, so the lower quartile is what a worker with orders needs between two batches.
    """
    pauses = sorted(_pauses_s(traces))
    return _made(traces, workers, pauses[len(pauses) // 4])


def _made(traces: Sequence[BatchTrace], workers: int, pause_s: float) -> Interval:
    """Samples/s that are made ready, by workers in service time and `pause_s` for each batch, and by a thread that pins."""
    # Before the first request the step did not compete for the cores yet, and a worker's first batch opens files.
    seen = [trace for trace in after_first_of_each(traces) if trace.fetch_start >= traces[0].requested]
    if len(seen) < workers:
        seen = list(traces)
    cycles = mean_interval([trace.service_s for trace in seen])
    extra_s = _slowest_mean_s(seen) - cycles.value + pause_s
    shifted = replace(cycles, value=cycles.value + extra_s, low=cycles.low + extra_s, high=cycles.high + extra_s)
    samples = fmean(trace.samples for trace in seen)
    made = _rate(shifted, workers * samples, len(seen))
    if seen[0].pin_end is None:
        return made
    pinned = _rate(mean_interval([trace.pin_s for trace in seen]), samples, len(seen))
    return min(made, pinned, key=lambda each: each.value)


def _pauses_s(traces: Sequence[BatchTrace], since: float = -math.inf) -> list[float]:
    """Seconds from one batch to the next in each worker, where they began after `since`; a single 0 where none did."""
    pauses = []
    before: dict[int, float] = {}
    for trace in traces:
        if before.get(trace.worker, -math.inf) > since:
            pauses.append(max(0.0, trace.fetch_start - before[trace.worker]))
        before[trace.worker] = trace.collate_end
    return pauses or [0.0]


def _slowest_mean_s(traces: Sequence[BatchTrace]) -> float:
    """Mean service of the worker that delivery in order waits for; that of all unless one is shown to be slower."""
    mean_s, by_worker = fmean(trace.service_s for trace in traces), dict[int, list[float]]()
    for trace in traces:
        by_worker.setdefault(trace.worker, []).append(trace.service_s)
    worst = max(by_worker.values(), key=fmean)
    # The slowest of many was picked for being slow: each of them had its chance of an extreme mean.
    is_slower = len(worst) > 2 and mean_interval(worst, 1 - 2 * SLOWER_BY_CHANCE / len(by_worker)).low > mean_s
    return fmean(worst) if is_slower else mean_s


def _rate(seconds: Interval, samples: float, count: int) -> Interval:
    """Samples per second of seconds per `samples`; on the logarithm, so that both limits stay positive and finite."""
    half = (seconds.high - seconds.low) / 2 / seconds.value
    if not math.isfinite(half):
        # Too short to know its error: that of a single waiting time as irregular as a Poisson stream's.
        half = student_t_quantile(0.975, 1)
    value = samples / seconds.value
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half), count=count)
