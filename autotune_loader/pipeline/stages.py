"""From what watchers saw in the workers of bursts to where the time of a sample goes. Pure functions of counts.

What a stage takes is its share of the CPU samples of the CPU seconds, and its share of the waiting looks of the rest: both
sums are known exactly, from clocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from autotune_loader.pipeline.stage_watch import Report
from autotune_loader.values.stages import HAND_OVER, Seen, StageSamples, StageTime

FEWEST = 50
"""Samples and looks together: with fewer a share is not known to 15 points, and nothing is said."""
OTHERS_SHARE = 0.05
"""More of a worker's CPU than this in threads beside the one that makes batches is a row of its own."""
SMALL = 0.005
"""Stages below this share are told together."""
OTHER_THREADS, REST = "other threads", "rest"  # stages as they are shown
TOTALS = ("samples", "wall_s", "cpu_s", "thread_cpu_s", "crowded_s", "queue_cpu_s", "looks")
"""Of a report, in its order."""


class StageTally:
    """Adds up what arrives with the batches of one burst, or of training.

    Args:
        most: reports that are kept, the latest; None is all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._reports: deque[Report] = deque(maxlen=most)
        self.add = self._reports.append

    def samples(self) -> StageSamples | None:
        """All of it; None where nothing arrived."""
        if not self._reports:
            return None
        sums = [math.fsum(column) for column in zip(*(totals for _, totals in self._reports), strict=True)]
        seen = [
            Seen(stage=stage, where=where, computing=computing, waiting=waiting, released=released)
            for rows, _ in self._reports
            for stage, where, computing, waiting, released in rows
        ]
        return StageSamples(seen=tuple(_merged(seen)), **dict(zip(TOTALS, sums, strict=True)))


def pooled(bursts: Iterable[StageSamples | None]) -> StageSamples | None:
    """Several bursts as one; None where none was watched."""
    known = [each for each in bursts if each is not None]
    if not known:
        return None
    sums = {name: math.fsum(getattr(each, name) for each in known) for name in TOTALS}
    return StageSamples(seen=tuple(_merged(seen for each in known for seen in each.seen)), **sums)


def stage_times(burst: StageSamples | None) -> tuple[StageTime, ...]:
    """Where a sample's time in a worker goes, the longest stage first; empty where too little was seen to say."""
    if burst is None or burst.samples <= 0 or burst.wall_s <= 0:
        return ()
    known = [each for each in burst.seen if each.stage]
    if sum(each.computing + each.waiting for each in known) < FEWEST:
        return ()
    computing = _shares(_computing(known, burst))
    waiting = _shares([each.waiting for each in known])
    cpu_s, idle_s = min(burst.thread_cpu_s, burst.wall_s), _idle_s(burst)
    rows = [
        (each.stage, each.where, at_work * cpu_s + at_rest * idle_s, at_work * cpu_s)
        for each, at_work, at_rest in zip(known, computing, waiting, strict=True)
    ]
    rows += [(REST, "seen by no sample", cpu_s, cpu_s)] if not any(computing) else []
    rows += [(REST, "seen by no look", idle_s, 0.0)] if not any(waiting) else []
    rows.append((HAND_OVER, "multiprocessing's queue", burst.queue_cpu_s, burst.queue_cpu_s))
    others_s = burst.cpu_s - burst.thread_cpu_s - burst.queue_cpu_s
    if others_s > OTHERS_SHARE * burst.cpu_s:
        rows.append((OTHER_THREADS, "threads of the dataset or of its libraries", 0.0, others_s))
    return _by_stage(rows, burst.samples)


def _computing(known: Sequence[Seen], burst: StageSamples) -> list[float]:
    """CPU seconds by CPU samples, and no fewer than were seen for certain.

    A sample that falls into an operator (`x / 255`) is taken after it, maybe within the next function.
    """
    sampled = [share * burst.thread_cpu_s for share in _shares([each.computing for each in known])]
    if burst.looks <= 0:
        return sampled
    in_time_s = math.fsum(each.waiting for each in known)
    idle_s = _idle_s(burst)
    if in_time_s < 1 or not idle_s:  # without waiting there is nothing to scale by: all looks count alike
        return sampled
    scale = idle_s / in_time_s
    return [
        max(cpu_s, (each.released - 3 * math.sqrt(each.released)) * scale)
        for each, cpu_s in zip(known, sampled, strict=True)
    ]


def _idle_s(burst: StageSamples) -> float:
    """Seconds of waiting for anything but a core, which would say more of the burst than of the sample."""
    return max(0.0, burst.wall_s - burst.thread_cpu_s - burst.crowded_s)


def _shares(values: Sequence[float]) -> list[float]:
    whole = math.fsum(values)
    return [value / whole if whole > 0 else 0.0 for value in values]


def _merged(seen: Iterable[Seen]) -> list[Seen]:
    found: dict[tuple[str, str], list[float]] = {}
    for each in seen:
        counts = found.setdefault((each.stage, each.where), [0.0, 0.0, 0.0])
        for i, more in enumerate((each.computing, each.waiting, each.released)):
            counts[i] += more
    return [
        Seen(stage=stage, where=where, computing=counts[0], waiting=counts[1], released=counts[2])
        for (stage, where), counts in found.items()
    ]


def _is_small(own: Sequence[tuple[str, str, float, float]], wall_s: float, cpu_s: float) -> bool:
    wall, cpu = math.fsum(row[2] for row in own), math.fsum(row[3] for row in own)
    return wall <= SMALL * wall_s and cpu <= SMALL * cpu_s


def _by_stage(rows: Sequence[tuple[str, str, float, float]], samples: float) -> tuple[StageTime, ...]:
    wall_s, cpu_s = math.fsum(row[2] for row in rows), math.fsum(row[3] for row in rows)
    stages: dict[str, list[tuple[str, str, float, float]]] = {}
    for row in rows:
        if row[2] or row[3] or row[0] == HAND_OVER:
            stages.setdefault(row[0], []).append(row)
    for stage, own in list(stages.items()):
        if _is_small(own, wall_s, cpu_s) and stage != HAND_OVER:
            stages.setdefault(REST, []).extend((REST, "all other lines", *row[2:]) for row in stages.pop(stage))
    times = [
        StageTime(
            stage=stage,
            where=max(own, key=lambda row: row[2] + row[3])[1],
            wall_share=math.fsum(row[2] for row in own) / wall_s if wall_s else 0.0,
            cpu_share=math.fsum(row[3] for row in own) / cpu_s if cpu_s else 0.0,
            wall_s=math.fsum(row[2] for row in own) / samples,
            cpu_s=math.fsum(row[3] for row in own) / samples,
        )
        for stage, own in stages.items()
    ]
    return tuple(sorted(times, key=lambda each: (-each.wall_share, -each.cpu_share)))
