"""What about half of the cores would do, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune_loader.report.standings import standings
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig

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
    is_measured: bool


def frontier_points(result: TuningResult) -> tuple[Point, ...]:
    """Every measured configuration, and other numbers of workers as the twin has them; the fewest cores first."""
    points = [*_measured(result), *_predicted(result)]
    return tuple(sorted(points, key=lambda each: (each.cores, -each.samples_per_s)))


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


def _measured(result: TuningResult) -> list[Point]:
    if result.twin is None:
        return []
    return [
        Point(
            config=row.config,
            samples_per_s=row.rate.value,
            cores=row.measurement.cpu_share * result.twin.usable_cores,
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
            is_measured=False,
        )
        for each in result.predict_all(configs)
        if each.cores is not None
    ]
