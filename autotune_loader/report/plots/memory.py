"""Throughput against memory: what more speed costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import standings
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

NARROWEST_BYTES = 16 << 20
"""A narrower axis would blow up differences of nothing, with ticks that read alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration, as the table has it."""

    memory_bytes: int
    rate: Interval
    label: str
    """Workers x prefetch_factor."""
    is_best: bool
    is_baseline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """What the picture shows."""

    points: tuple[Point, ...]
    meter: Literal["pss", "rss"]
    """PSS, or RSS where PSS is missing of any burst: the two are not comparable."""
    ceiling: Interval | None


def memory_info(result: TuningResult) -> MemoryInfo:
    """Gather what `plot_memory` draws; configurations whose memory was not measured are left out."""
    rows = [
        (row, row.rate, row.measurement.memory)
        for row in standings(result)
        if row.rate is not None and row.measurement is not None and row.measurement.memory is not None
    ]
    meter: Literal["pss", "rss"] = "pss" if all(memory.pss_bytes is not None for _, _, memory in rows) else "rss"
    points = tuple(
        Point(
            memory_bytes=memory.taken_bytes if meter == "pss" else memory.rss_bytes,
            rate=rate,
            label=_label(row.config),
            is_best=row.is_best,
            is_baseline=row.is_baseline,
        )
        for row, rate, memory in rows
    )
    return MemoryInfo(points=points, meter=meter, ceiling=result.ceiling)


def _label(config: LoaderConfig) -> str:
    return f"{config.num_workers}" + ("" if config.prefetch_factor is None else f"×{config.prefetch_factor}")


def plot_memory(result: TuningResult) -> canvas.Figure:
    """Samples/s against the memory of the whole process tree, each configuration labelled workers x prefetch_factor."""
    info = memory_info(result)
    content = (
        partial(_draw, info, result.measured.rate_unit) if info.points else "Memory was not measured in any burst."
    )
    return canvas.picture("What speed costs in memory", content)


def labelled(points: tuple[Point, ...]) -> list[Point]:
    """The points whose labels fit: the chosen one and the baseline first, then by rate; near neighbours go without."""
    width = max(NARROWEST_BYTES, max(p.memory_bytes for p in points) - min(p.memory_bytes for p in points))
    height = max(p.rate.value for p in points)
    ranked = sorted(points, key=lambda p: (not (p.is_best or p.is_baseline), -p.rate.value))
    return canvas.apart(ranked, lambda p: (p.memory_bytes / width / 0.07, p.rate.value / height / 0.09))


def _draw(info: MemoryInfo, unit: str, axes: canvas.Axes) -> None:
    canvas.draw_ceiling(axes, info.ceiling, max(point.rate.value for point in info.points))
    for points, marker, colour, size, label in (
        (
            [p for p in info.points if not (p.is_best or p.is_baseline)],
            "o",
            canvas.BLUE,
            6,
            "workers×prefetch_factor",
        ),
        ([p for p in info.points if p.is_baseline and not p.is_best], "s", canvas.BLACK, 8, "before tuning"),
        ([p for p in info.points if p.is_best], "*", canvas.VERMILLION, 15, "chosen"),
    ):
        places = [(point.memory_bytes / 2**20, point.rate) for point in points]
        canvas.draw_rates(axes, places, marker, color=colour, markersize=size, ecolor=canvas.GREY, label=label)
    for point in labelled(info.points):
        place = (point.memory_bytes / 2**20, point.rate.value)
        axes.annotate(point.label, place, xytext=(6, 4), textcoords="offset points", fontsize=8)
    name = "PSS" if info.meter == "pss" else "RSS, shared pages counted for each process,"
    axes.margins(x=0.08)
    canvas.label_rates(axes, f"peak {name} of all processes in MiB", unit)
    axes.xaxis.set_major_formatter(canvas.thousands)
    canvas.whole_numbers(axes.xaxis)
    least, most = min(p.memory_bytes for p in info.points), max(p.memory_bytes for p in info.points)
    if most - least < NARROWEST_BYTES:
        left = (least + most - NARROWEST_BYTES) / 2 / 2**20
        axes.set_xlim(left, left + NARROWEST_BYTES / 2**20)
