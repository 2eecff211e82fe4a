"""From what clocks in the workers of bursts have seen to where the time of a sample goes. Pure functions of seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune_loader.values.stages import HAND_OVER, Line, Seen, StageSamples, StageTime

FEWEST_S = 0.02
"""Seconds that were clocked: of less nothing is said."""
OTHERS_SHARE = 0.05
"""More of a worker's CPU than this in threads beside the one that makes batches is a row of its own."""
SMALL = 0.005
"""Stages below this share are told together."""
OTHER_THREADS, REST = "other threads", "rest"  # stages as they are shown
TOTALS = ("samples", "wall_s", "cpu_s", "queue_cpu_s")
"""Fields of `StageSamples` that add up."""


def pooled(seen: Iterable[StageSamples | None]) -> StageSamples | None:
    """What several workers or bursts have seen, as one; None where none was watched."""
    known = [each for each in seen if each is not None]
    if not known:
        return None
    lines: dict[Line, tuple[float, float]] = {}
    for row in (row for each in known for row in each.seen):
        wall_s, cpu_s = lines.get(row[:2], (0.0, 0.0))
        lines[row[:2]] = wall_s + row.wall_s, cpu_s + row.cpu_s
    sums = {name: math.fsum(getattr(each, name) for each in known) for name in TOTALS}
    return StageSamples(seen=tuple(Seen(*line, *seconds) for line, seconds in lines.items()), **sums)


def stage_times(burst: StageSamples | None) -> tuple[StageTime, ...]:
    """Where a sample's time in a worker goes, the longest stage first; empty where too little was seen to say."""
    if burst is None or burst.samples <= 0 or burst.wall_s < FEWEST_S:
        return ()
    computed_s, rows = math.fsum(each.cpu_s for each in burst.seen), list(burst.seen)
    rows.append(Seen(HAND_OVER, "multiprocessing's queue", burst.queue_cpu_s, burst.queue_cpu_s))
    others_s = burst.cpu_s - computed_s - burst.queue_cpu_s
    if others_s > OTHERS_SHARE * burst.cpu_s:
        rows.append(Seen(OTHER_THREADS, "threads of the dataset or of its libraries", 0.0, others_s))
    return _by_stage(rows, burst.samples)


def _by_stage(rows: list[Seen], samples: float) -> tuple[StageTime, ...]:
    wall_s, cpu_s = math.fsum(row.wall_s for row in rows), math.fsum(row.cpu_s for row in rows)
    stages: dict[str, list[Seen]] = {}
    for row in rows:
        is_small = row.wall_s <= SMALL * wall_s and row.cpu_s <= SMALL * cpu_s and row.stage != HAND_OVER
        stages.setdefault(REST if is_small else row.stage, []).append(row)
    times = []
    for stage, own in stages.items():
        longest = max(own, key=lambda row: row.wall_s + row.cpu_s)
        wall, cpu = math.fsum(row.wall_s for row in own), math.fsum(row.cpu_s for row in own)
        times.append(
            StageTime(
                stage=stage,
                where="all other lines" if stage == REST else longest.where,
                wall_share=wall / wall_s if wall_s else 0.0,
                cpu_share=cpu / cpu_s if cpu_s else 0.0,
                wall_s=wall / samples,
                cpu_s=cpu / samples,
            )
        )
    return tuple(sorted(times, key=lambda each: (-each.wall_share, -each.cpu_share)))
