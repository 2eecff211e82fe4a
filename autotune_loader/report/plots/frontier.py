"""What speed costs in cores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from autotune_loader.report.frontier import Point, frontier_points, on_frontier
from autotune_loader.report.plots import canvas
from autotune_loader.report.units import bytes_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierInfo:
    """What the picture shows."""

    points: tuple[Point, ...]
    unbeaten: tuple[Point, ...]
    chosen: Point | None
    ceiling: Interval | None


def frontier_info(result: TuningResult) -> FrontierInfo:
    """Gather what `plot_frontier` draws."""
    points = frontier_points(result)
    chosen = next((each for each in points if each.is_measured and each.config == result.best), None)
    return FrontierInfo(points=points, unbeaten=on_frontier(points), chosen=chosen, ceiling=result.ceiling)


def plot_frontier(result: TuningResult) -> canvas.Figure:
    """Samples/s over the cores that are kept busy; those that nothing beats are joined, with their memory."""
    info = frontier_info(result)
    content = (
        partial(_draw, info, result.measured.rate_unit) if info.points else "CPU time was not measured in any burst."
    )
    return canvas.picture("What speed costs in cores", content)


def labelled(info: FrontierInfo) -> list[Point]:
    """The unbeaten points whose labels fit: the chosen one first, then from the most cores on."""
    most, height = (max(getattr(each, name) for each in info.points) for name in ("cores", "samples_per_s"))
    ranked = sorted(info.unbeaten, key=lambda each: (each is not info.chosen, -each.cores))
    return canvas.apart(ranked, lambda each: (each.cores / most / 0.18, each.samples_per_s / height / 0.07))


def _draw(info: FrontierInfo, unit: str, axes: canvas.Axes) -> None:
    def places(points: list[Point]) -> list[tuple[float, float]]:
        return [(each.cores, each.samples_per_s) for each in points]

    canvas.draw_ceiling(axes, info.ceiling, max(each.samples_per_s for each in info.points))
    axes.plot(
        *zip(*places(list(info.unbeaten)), strict=True), color=canvas.GREEN, linewidth=1.5, label="nothing beats these"
    )
    measured = [each for each in info.points if each.is_measured]
    canvas.draw_points(axes, places(measured), "o", color=canvas.BLUE, label="measured")
    others = [each for each in info.points if not each.is_measured]
    canvas.draw_points(axes, places(others), "o", color=canvas.BLUE, markerfacecolor="white", label="predicted")
    if info.chosen is not None:
        canvas.draw_points(axes, places([info.chosen]), "*", color=canvas.VERMILLION, markersize=15, label="chosen")
    for each in labelled(info):
        memory = "" if each.memory_bytes is None else f", {bytes_text(each.memory_bytes)}"
        label = f"{each.config.num_workers}{memory}"
        axes.annotate(label, (each.cores, each.samples_per_s), xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.set_xlim(0, 1.08 * max(each.cores for each in info.points))
    canvas.label_rates(axes, "cores kept busy; beside the points: workers, memory", unit)
