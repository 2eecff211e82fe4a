"""Samples/s over the number of workers: where more workers stop helping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import predicted_rates, rate_of, standings, tolerance_of
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersInfo:
    """What the picture shows."""

    fastest: tuple[tuple[int, Interval], ...]
    """(workers, samples/s) of the fastest configuration with each number of workers, by workers."""
    curve: tuple[tuple[int, float], ...]
    """What the twin says after the last burst, for the chosen configuration with any number of workers."""
    best: tuple[int, Interval] | None
    """The chosen configuration; its rate is that of the finals, where it ran in them."""
    best_from_finals: bool
    baseline: tuple[int, Interval] | None
    plateau: tuple[float, float] | None
    """Rates within the tolerance of the chosen configuration's."""
    ceiling: Interval | None


def workers_info(result: TuningResult) -> WorkersInfo:
    """Gather what `plot_workers` draws."""
    measured = [(row.config.num_workers, row.rate) for row in standings(result) if row.rate is not None]
    fastest: dict[int, Interval] = {}
    for workers, rate in sorted(measured, key=lambda pair: pair[1].value):
        fastest[workers] = rate
    best = rate_of(result.best, result.finals, result.trials, is_best=True)
    baseline = rate_of(result.baseline, result.finals, result.trials, is_best=result.baseline == result.best)
    tolerance = tolerance_of(result)
    return WorkersInfo(
        fastest=tuple(sorted(fastest.items())),
        curve=_curve(result, max([*fastest, result.best.num_workers]) if fastest else -1),
        best=(result.best.num_workers, best) if best else None,
        best_from_finals=bool(result.finals.rates_of(result.best)),
        baseline=(result.baseline.num_workers, baseline) if baseline else None,
        plateau=None if best is None else (best.value * (1 - tolerance), best.value / (1 - tolerance)),
        ceiling=result.ceiling,
    )


def _curve(result: TuningResult, most: int) -> tuple[tuple[int, float], ...]:
    counts = range(most + 1)
    rates = predicted_rates(result, [result.best.with_workers(count) for count in counts])
    return tuple(zip(counts, rates, strict=False))


def plot_workers(result: TuningResult) -> canvas.Figure:
    """Samples/s over workers: measured with intervals, predicted, the plateau and the ceiling."""
    info = workers_info(result)
    content = (
        partial(_draw, info, result.measured.rate_unit)
        if info.fastest
        else "No configuration worked, so there is no rate to show."
    )
    return canvas.picture("How many workers help", content)


def _draw(info: WorkersInfo, unit: str, axes: canvas.Axes) -> None:
    chosen = info.best[1].value if info.best else 0.0
    canvas.draw_ceiling(axes, info.ceiling, max([chosen, *(rate.value for _, rate in info.fastest)]))
    if info.plateau:
        tolerance = share_text(1 - info.plateau[0] / chosen)
        axes.axhspan(
            *info.plateau, color=canvas.GREEN, alpha=0.18, linewidth=0, label=f"within {tolerance} of the chosen one"
        )
    canvas.draw_rates(axes, info.fastest, "o-", color=canvas.BLUE, capsize=3, label="measured, 95 % interval")
    canvas.draw_points(axes, info.curve, ":", color=canvas.PURPLE, linewidth=2, label="predicted")
    for point, marker, colour, size, label in (
        (info.baseline, "s", canvas.BLACK, 8, "before tuning"),
        (info.best, "*", canvas.VERMILLION, 15, "chosen, in the paired rounds" if info.best_from_finals else "chosen"),
    ):
        canvas.draw_rates(
            axes, [point] if point else [], marker, color=colour, markersize=size, capsize=3, label=label, zorder=5
        )
    canvas.label_rates(axes, "worker processes", unit)
    canvas.whole_numbers(axes.xaxis)
