"""The history of one batch, and where a sample's time goes in a worker.

Times are seconds on the machine's monotonic clock, the same in every process of one machine.

worker     fetch_start ── __getitem__ ── fetch_end ── collate ── collate_end
thread                                                                pin_start ── pin_end    where one pins
consumer                     requested ──────── wait ──────────────────────────── received ── step ── step_end
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAIN_PROCESS, PINNING_THREAD = -1, -2
"""In place of a worker: a batch that the consumer fetched itself (0 workers), and a span of the thread that pins."""
TRANSFER, OTHER_THREADS = "transfer", "other threads"
"""Stages beside the others: a thread writes batches to the queue, and libraries may have threads of their own."""
OTHERS_SHARE = 0.05
"""More of a worker's CPU than this in threads beside the one that makes batches is a row of its own."""
FEWEST_S = 0.02
"""Seconds that were clocked: of less nothing is said."""


class BatchTrace(NamedTuple):
    """The history of one batch, in the order of delivery; making one takes half a microsecond."""

    worker: int  # worker that fetched it, from 0; `MAIN_PROCESS` without workers
    fetch_start: float  # when the worker began to fetch, in seconds
    fetch_end: float  # when the last sample was there and collating began, in seconds
    collate_end: float  # when the batch was whole, in seconds
    cpu_s: float  # CPU seconds of fetch and collate together
    samples: int  # samples in the batch
    requested: float  # when the training loop asked for the batch, in seconds
    received: float  # when the training loop had it, in seconds
    step_end: float  # when the training step was done, in seconds
    pin_start: float | None = None  # when torch's pinning thread had the batch, in seconds; None where no thread pins
    pin_end: float | None = None  # when the batch was pinned, in seconds

    @property
    def service_s(self) -> float:
        """Wall seconds that a worker spent on the batch: fetch and collate."""
        return self.collate_end - self.fetch_start

    @property
    def wait_s(self) -> float:
        """Seconds the training loop stood still for the batch, its delivery included."""
        return self.received - self.requested

    @property
    def ready(self) -> float:
        """When the training loop could have it: it was whole, and pinned where a thread does that."""
        return self.collate_end if self.pin_end is None else self.pin_end

    @property
    def receive_s(self) -> float:
        """Seconds in which the training loop takes a batch that is ready: transport and rebuild are the thread's, if any."""
        return self.received - max(self.requested, self.ready)

    @property
    def pin_s(self) -> float:
        """Seconds of pinning in a thread; 0 without one."""
        return 0.0 if self.pin_start is None or self.pin_end is None else self.pin_end - self.pin_start

    @property
    def step_s(self) -> float:
        """Seconds of the training step."""
        return self.step_end - self.received


class Span(NamedTuple):
    """One thing that was done with a batch."""

    activity: str  # "wait" or "step" of the loop, "fetch", "collate" or "send" of a worker, "pin" of the pinning thread
    process: int  # worker, from 0; `MAIN_PROCESS` or `PINNING_THREAD`
    begin: float  # in seconds
    end: float  # in seconds


def spans_of(trace: BatchTrace) -> list[Span]:
    """What was done with a batch. It is sent until the pinning thread has it, or the loop where none pins.

    Only spans of "send" overlap others of their worker, which fetches the next batch meanwhile.
    """
    worker, wait = trace.worker, Span("wait", MAIN_PROCESS, trace.requested, trace.received)
    fetch = Span("fetch", worker, trace.fetch_start, trace.fetch_end)
    spans = [wait, fetch, Span("collate", worker, trace.fetch_end, trace.collate_end)]
    if worker != MAIN_PROCESS:
        until = trace.received if trace.pin_start is None else trace.pin_start
        spans.append(Span("send", worker, trace.collate_end, until))
    if trace.pin_start is not None and trace.pin_end is not None:
        spans.append(Span("pin", PINNING_THREAD, trace.pin_start, trace.pin_end))
    return [*spans, Span("step", MAIN_PROCESS, trace.received, trace.step_end)]


def after_first_of_each(traces: Sequence[BatchTrace]) -> list[BatchTrace]:
    """The batches that were not the first of their worker, which opens files and fills caches."""
    first = {trace.worker: position for position, trace in reversed(list(enumerate(traces)))}
    return [trace for position, trace in enumerate(traces) if first[trace.worker] != position]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage of what a worker does for a sample; the shares of all stages add up to 1.

    Wall seconds are those of computing and of waiting for storage, the network or locks. Waiting for a core, which stretches
    every stage where workers are more than cores, is not among them.
    """

    stage: str  # such as "decode", a transform's or a function's name, "collate", or "transfer" to the training process
    where: str
    """The line of the user's that most of it was seen in, or what it calls, such as "photos.py:41" or "PIL.Image.open"."""
    wall_share: float  # share of a sample's wall seconds in a worker
    cpu_share: float  # share of a sample's CPU seconds in a worker
    wall_s: float
    """Wall seconds for each sample; without those of waiting for a core, where the kernel tells them (`schedstat`)."""
    cpu_s: float  # CPU seconds for each sample

    @property
    def is_library(self) -> bool:
        """Whether it is a library's function, which has no line of the user's."""
        return not is_line(self.where)

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for anything but a core, for each sample."""
        return max(0.0, self.wall_s - self.cpu_s)


def is_line(where: str) -> bool:
    """Whether it is a line of the user's, such as "photos.py:41", and not a library's function, such as "PIL.Image.open"."""
    return where.rpartition(":")[2].isdigit()


class Seen(NamedTuple):
    """What was seen of one stage."""

    stage: str
    where: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSamples:
    """What the clocks in a burst's workers saw, of the batches that were clocked."""

    seen: tuple[Seen, ...]
    samples: float
    cpu_s: float  # CPU seconds of the process meanwhile, all its threads together
    queue_cpu_s: float  # CPU seconds of the thread that writes batches to the queue


def pooled(reports: Iterable[StageSamples | None]) -> StageSamples | None:
    """What several workers or bursts have seen, as one; None where none was watched."""
    known = [each for each in reports if each is not None]
    if not known:
        return None
    lines: dict[tuple[str, str], tuple[float, float]] = {}
    for stage, where, wall_s, cpu_s in (row for each in known for row in each.seen):
        before = lines.get((stage, where), (0.0, 0.0))
        lines[stage, where] = before[0] + wall_s, before[1] + cpu_s
    names = ("samples", "cpu_s", "queue_cpu_s")
    totals = {name: math.fsum(getattr(each, name) for each in known) for name in names}
    return StageSamples(seen=tuple(Seen(*line, *seconds) for line, seconds in lines.items()), **totals)


def stage_times(burst: StageSamples | None) -> tuple[StageTime, ...]:
    """Where a sample's time in a worker goes, the longest stage first; empty where too little was seen to say."""
    if burst is None or burst.samples <= 0 or math.fsum(row.wall_s for row in burst.seen) < FEWEST_S:
        return ()
    rows = [*burst.seen, Seen(TRANSFER, "multiprocessing's queue", burst.queue_cpu_s, burst.queue_cpu_s)]
    others_s = burst.cpu_s - math.fsum(each.cpu_s for each in rows)
    if others_s > OTHERS_SHARE * burst.cpu_s:
        rows.append(Seen(OTHER_THREADS, "threads of the dataset or of its libraries", 0.0, others_s))
    all_wall_s, all_cpu_s = math.fsum(row.wall_s for row in rows), math.fsum(row.cpu_s for row in rows)
    stages: dict[tuple[str, bool], list[Seen]] = {}
    for row in rows:  # a function of the user's may have the name of a library's stage
        stages.setdefault((row.stage, is_line(row.where)), []).append(row)
    times = []
    for (stage, _), own in stages.items():
        wall_s, cpu_s = math.fsum(row.wall_s for row in own), math.fsum(row.cpu_s for row in own)
        times.append(
            StageTime(
                stage=stage,
                where=max(own, key=lambda row: row.wall_s + row.cpu_s).where,
                wall_share=wall_s / all_wall_s,
                cpu_share=cpu_s / all_cpu_s if all_cpu_s else 0.0,
                wall_s=wall_s / burst.samples,
                cpu_s=cpu_s / burst.samples,
            )
        )
    return tuple(sorted(times, key=lambda each: (-each.wall_share, -each.cpu_share)))
