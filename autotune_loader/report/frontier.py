"""What speed costs in cores and memory: points from the table, the twin's between them, and which of them nothing beats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune_loader.report.standings import standings
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig

if TYPE_CHECKING:
    import pandas as pd

FEWER_CORES = 0.6
"""Of the cores: what is told in one sentence is about half of them ..."""
WORTH_TELLING = 0.7
"""... and most of the rate."""
LEAST_CORES = 0.5
"""Who keeps less than this of one core busy has nothing to save."""
CLOSE = 0.005
"""Rates and cores this close count as equal: clocks tell no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration, and what it takes."""

    config: LoaderConfig
    samples_per_s: float
    cores: float
    """Kept busy on average."""
    memory_bytes: int | None
    is_measured: bool


def frontier_points(result: TuningResult) -> tuple[Point, ...]:
    """Every measured configuration, and other numbers of workers as the twin has them; the fewest cores first."""
    points = [*_measured(result), *_predicted(result)]
    return tuple(sorted(points, key=lambda each: (each.cores, -each.samples_per_s)))


def on_frontier(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Those that nothing beats: no other is as fast with no more cores and no more memory."""
    return tuple(each for each in points if not any(_beats(other, each) for other in points))


def frontier_sentence(result: TuningResult) -> str:
    """What about half of the cores would do; "" where that is little, or where cores were not measured."""
    points = frontier_points(result)
    best = next((each for each in points if each.is_measured and each.config == result.best), None)
    if best is None or best.cores < LEAST_CORES:
        return ""
    fewer = [each for each in points if each.cores <= FEWER_CORES * best.cores]
    found = max(fewer, key=lambda each: each.samples_per_s, default=None)
    if found is None or not WORTH_TELLING <= found.samples_per_s / best.samples_per_s <= 1 + CLOSE:
        return ""
    source = "" if found.is_measured else ", as the twin has it"
    return (
        f"Fewer cores: {share_text(found.samples_per_s / best.samples_per_s)} of the rate with {found.cores:.1f} instead of "
        f"{best.cores:.1f} cores busy ({found.config}{source})."
    )


def frontier_frame(result: TuningResult) -> pd.DataFrame:
    """One row per point, the fewest cores first."""
    import pandas as pd

    points = frontier_points(result)
    unbeaten = on_frontier(points)
    best = next((each.samples_per_s for each in points if each.is_measured and each.config == result.best), None)
    rows = [
        {
            "num_workers": each.config.num_workers,
            "prefetch_factor": each.config.prefetch_factor,
            "samples_per_s": each.samples_per_s,
            "rate_share": each.samples_per_s / best if best else None,
            "cores": each.cores,
            "memory_bytes": each.memory_bytes,
            "source": "measured" if each.is_measured else "predicted",
            "on_frontier": each in unbeaten,
        }
        for each in points
    ]
    types = {"num_workers": "int64", "prefetch_factor": "Int64", "samples_per_s": "float64", "rate_share": "float64"}
    types |= {"cores": "float64", "memory_bytes": "Int64", "source": "object", "on_frontier": "bool"}
    frame: pd.DataFrame = pd.DataFrame(rows, columns=list(types)).astype(types)
    return frame


def _beats(one: Point, other: Point) -> bool:
    if one is other or one.samples_per_s < other.samples_per_s * (1 - CLOSE) or one.cores > other.cores * (1 + CLOSE):
        return False
    if one.memory_bytes is not None and other.memory_bytes is not None and one.memory_bytes > other.memory_bytes:
        return False
    saves = one.cores < other.cores * (1 - CLOSE) or (one.memory_bytes or 0) < (other.memory_bytes or 0)
    return saves or one.samples_per_s > other.samples_per_s * (1 + CLOSE)


def _measured(result: TuningResult) -> list[Point]:
    if result.twin is None:
        return []
    return [
        Point(
            config=row.config,
            samples_per_s=row.rate.value,
            cores=row.measurement.cpu_share * result.twin.usable_cores,
            memory_bytes=None if row.measurement.memory is None else row.measurement.memory.taken_bytes,
            is_measured=True,
        )
        for row in standings(result)
        if row.rate is not None and row.measurement is not None and row.measurement.cpu_share is not None
    ]


def _predicted(result: TuningResult) -> list[Point]:
    tried = {trial.config.num_workers for trial in result.trials if trial.measurement is not None}
    others = [workers for workers in range(1, max(tried, default=0)) if workers not in tried]
    if not others or result.best.batch_size is not None or result.twin is None:
        return []
    ahead = result.best.prefetch_factor or TORCH_PREFETCH_FACTOR
    configs = [replace(result.best, num_workers=workers, prefetch_factor=ahead) for workers in others]
    return [
        Point(
            config=each.config,
            samples_per_s=each.samples_per_s.value,
            cores=each.cores,
            memory_bytes=each.pss_bytes,
            is_measured=False,
        )
        for each in result.predict_all(configs)
        if each.cores is not None
    ]
