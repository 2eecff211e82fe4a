"""Samples/s over the number of workers: where more workers stop helping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune_loader.report.plots.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILLION,
    canvas,
    draw_ceiling,
    error_bars,
    legend_below,
    say_nothing_to_show,
    thousands,
    whole_numbers,
)
from autotune_loader.report.standings import predicted_rates, rate_of, tolerance_of, with_workers
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersInfo:
    """What the picture shows."""

    fastest: tuple[tuple[int, Interval], ...]
    """(workers, samples/s) of the fastest burst at each number of workers, by workers."""
    others: tuple[tuple[int, float], ...]
    """The other bursts."""
    predicted: tuple[tuple[int, float], ...]
    """The twin's highest prediction at each number of workers, made before the burst."""
    curve: tuple[tuple[int, float], ...]
    """What the twin says after the last burst, for the chosen configuration with any number of workers."""
    best: tuple[int, Interval] | None
    """The chosen configuration; its rate is that of the finals, where it ran in them."""
    baseline: tuple[int, Interval] | None
    plateau: tuple[float, float] | None
    """Rates that count as equal to the fastest burst."""
    ceiling: Interval | None


def workers_info(result: TuningResult, tolerance: float | None = None) -> WorkersInfo:
    """Gather what `plot_workers` draws."""
    measured = [(each.config.num_workers, each.measurement.samples_per_s) for each in result.trials if each.measurement]
    fastest: dict[int, Interval] = {}
    for workers, rate in sorted(measured, key=lambda pair: pair[1].value):
        fastest[workers] = rate
    predicted: dict[int, float] = {}
    for trial in result.trials:
        if trial.predicted_samples_per_s is not None:
            workers = trial.config.num_workers
            predicted[workers] = max(predicted.get(workers, 0.0), trial.predicted_samples_per_s)
    tolerance = tolerance_of(result) if tolerance is None else tolerance
    top = max((rate.value for rate in fastest.values()), default=None)
    best, baseline = rate_of(result.best, result), rate_of(result.baseline, result)
    return WorkersInfo(
        fastest=tuple(sorted(fastest.items())),
        others=tuple((workers, rate.value) for workers, rate in measured if rate is not fastest[workers]),
        predicted=tuple(sorted(predicted.items())),
        curve=_curve(result, max(fastest, default=-1)),
        best=(result.best.num_workers, best) if best else None,
        baseline=(result.baseline.num_workers, baseline) if baseline else None,
        plateau=None if top is None else ((1 - tolerance) * top, top),
        ceiling=result.ceiling,
    )


def _curve(result: TuningResult, most: int) -> tuple[tuple[int, float], ...]:
    counts = range(most + 1)
    rates = predicted_rates(result, [with_workers(result.best, count) for count in counts])
    return tuple(zip(counts, rates, strict=False))


def plot_workers(result: TuningResult) -> Figure:
    """Samples/s over workers: bursts with their intervals, the twin's predictions, the plateau and the ceiling."""
    info = workers_info(result)
    with canvas("How many workers help") as (figure, axes):
        if info.fastest:
            _draw(axes, info)
            legend_below(figure)
        else:
            say_nothing_to_show(axes, "No configuration worked, so there is no rate to show.")
    return figure


def _draw(axes: Axes, info: WorkersInfo) -> None:
    draw_ceiling(axes, info.ceiling, max(rate.value for _, rate in info.fastest))
    if info.plateau:
        axes.axhspan(*info.plateau, color=GREEN, alpha=0.18, linewidth=0, label="as fast as the fastest burst")
    if info.others:
        axes.plot(*zip(*info.others, strict=True), "o", color=GREY, markersize=4, alpha=0.7, label="other bursts")
    workers, rates = zip(*info.fastest, strict=True)
    values = [rate.value for rate in rates]
    axes.errorbar(
        workers, values, error_bars(list(rates)), fmt="o-", color=BLUE, capsize=3, label="fastest burst, 95 % interval"
    )
    if info.predicted:
        (line,) = axes.plot(*zip(*info.predicted, strict=True), "D", color=PURPLE, label="predicted before the burst")
        line.set(markerfacecolor="none", markersize=8)
    if info.curve:
        axes.plot(*zip(*info.curve, strict=True), ":", color=PURPLE, linewidth=2, label="the twin, chosen settings")
    for point, marker, colour, label in (
        (info.baseline, "s", BLACK, "before tuning"),
        (info.best, "*", VERMILLION, "chosen"),
    ):
        if point:
            size = 15 if marker == "*" else 8
            axes.plot(point[0], point[1].value, marker, color=colour, markersize=size, label=label, zorder=5)
    axes.set(xlabel="worker processes", ylabel="samples per second", ylim=(0, None))
    whole_numbers(axes.xaxis)
    thousands(axes.yaxis)
