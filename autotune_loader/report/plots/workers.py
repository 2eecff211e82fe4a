"""Samples/s over the number of workers: where more workers stop helping."""

from __future__ import annotations

from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import rate_of, standings, tolerance_of
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval


def plot_workers(result: TuningResult) -> canvas.Figure:
    """Samples/s over workers: measured with intervals, predicted, the plateau and the ceiling.

    Of each number of workers the fastest configuration counts; the chosen one has its rate of the finals where it ran in them.
    """
    measured = [(row.config.num_workers, row.rate) for row in standings(result) if row.rate is not None]
    fastest = dict(sorted(measured, key=lambda pair: pair[1].value))  # the last one of each number stays
    nothing = "No configuration worked, so there is no rate to show."
    content = partial(_draw, result, sorted(fastest.items())) if fastest else nothing
    return canvas.picture("How many workers help", content)


def _draw(result: TuningResult, fastest: list[tuple[int, Interval]], axes: canvas.Axes) -> None:
    best = rate_of(result.best, result.finals, result.trials, is_best=True)
    baseline = rate_of(result.baseline, result.finals, result.trials, is_best=result.baseline == result.best)
    tops = [rate.value for _, rate in fastest] + ([best.value] if best else [])
    canvas.draw_ceiling(axes, result.ceiling, max(tops))
    tolerance = tolerance_of(result)
    if best is not None:
        plateau, label = (1 - tolerance, 1 / (1 - tolerance)), f"within {share_text(tolerance)} of the chosen one"
        low, high = (best.value * factor for factor in plateau)
        axes.axhspan(low, high, color=canvas.GREEN, alpha=0.18, linewidth=0, label=label)
    canvas.draw_rates(axes, fastest, "o-", color=canvas.BLUE, capsize=3, label="measured, 95 % interval")
    counts = range(max(fastest[-1][0], result.best.num_workers) + 1)
    asked = [result.best.with_workers(count) for count in counts]
    curve = [
        (each.config.num_workers, each.samples_per_s.value)
        for each in (result.predict_all(asked) if result.twin else ())
    ]
    canvas.draw_points(axes, curve, ":", color=canvas.PURPLE, linewidth=2, label="predicted")
    chosen = "chosen, in the paired rounds" if result.finals.rates_of(result.best) else "chosen"
    for config, rate, marker, colour, size, name in (
        (result.baseline, baseline, "s", canvas.BLACK, 8, "before tuning"),
        (result.best, best, "*", canvas.VERMILLION, 15, chosen),
    ):
        points = [(config.num_workers, rate)] if rate else []
        canvas.draw_rates(axes, points, marker, color=colour, markersize=size, capsize=3, label=name, zorder=5)
    canvas.label_rates(axes, "worker processes", result.measured.rate_unit)
    canvas.whole_numbers(axes.xaxis)
