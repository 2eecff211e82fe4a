"""Samples/s over the number of workers: where more workers stop helping."""

from __future__ import annotations

from functools import partial
from typing import Any

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import rate_of, standings, tolerance_of
from autotune_loader.report.units import rate_text, share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval

FAR_ABOVE = 1.6
"""A ceiling this many times as high as the rest would press everything else flat onto the axis."""


def plot_workers(result: TuningResult) -> canvas.Figure:
    """Samples/s over workers: measured with intervals, predicted, the plateau and the ceiling.

    Of each number of workers the fastest configuration counts; the chosen one has its rate of the finals where it ran in them.
    """
    measured = [(row.config.num_workers, row.rate) for row in standings(result) if row.rate is not None]
    fastest = dict(sorted(measured, key=lambda pair: pair[1].value))  # the last one of each number stays
    nothing = "No configuration worked, so there is no rate to show."
    content = partial(_draw, result, dict(sorted(fastest.items()))) if fastest else nothing
    return canvas.picture("How many workers help", content)


def _draw(result: TuningResult, fastest: dict[int, Interval], axes: canvas.Axes) -> None:
    best = rate_of(result.best, result.finals, result.trials, is_best=True)
    baseline = rate_of(result.baseline, result.finals, result.trials, is_best=result.baseline == result.best)
    top = max(rate.value for rate in (*fastest.values(), best) if rate is not None)
    if result.ceiling is not None and result.ceiling.value > FAR_ABOVE * top:
        axes.plot([], [], " ", label=f"ceiling {rate_text(result.ceiling.value)}, far above")
    elif result.ceiling is not None:
        dashed: dict[str, Any] = {"color": canvas.BLACK, "linewidth": 1.2, "linestyle": (0, (6, 3))}
        axes.axhline(result.ceiling.value, label="ceiling: the step alone", **dashed)
    if best is not None:
        tolerance = tolerance_of(result)
        low, high = best.value * (1 - tolerance), best.value / (1 - tolerance)
        label = f"within {share_text(tolerance)} of the chosen one"
        axes.axhspan(low, high, color=canvas.GREEN, alpha=0.18, linewidth=0, label=label)
    _draw_rates(axes, fastest, fmt="o-", color=canvas.BLUE, label="measured, 95 % interval")
    asked = [result.best.with_workers(count) for count in range(max(*fastest, result.best.num_workers) + 1)]
    if result.twin is not None and any(trial.measurement for trial in result.trials):
        rates = [each.samples_per_s.value for each in result.predict_all(asked)]
        axes.plot(range(len(rates)), rates, ":", color=canvas.PURPLE, linewidth=2, label="predicted")
    chosen = "chosen, in the paired rounds" if result.finals.rates_of(result.best) else "chosen"
    if baseline is not None:
        look: dict[str, Any] = {"color": canvas.BLACK, "markersize": 8, "zorder": 5}
        _draw_rates(axes, {result.baseline.num_workers: baseline}, fmt="s", label="before tuning", **look)
    if best is not None:
        look = {"color": canvas.VERMILLION, "markersize": 15, "zorder": 5}
        _draw_rates(axes, {result.best.num_workers: best}, fmt="*", label=chosen, **look)
    canvas.label_rates(axes, "worker processes", result.measured.rate_unit)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # type: ignore[call-arg, unused-ignore]


def _draw_rates(axes: canvas.Axes, rates: dict[int, Interval], **look: Any) -> None:
    """Rates with their intervals, where these tell anything."""
    below = [max(0.0, rate.value - rate.low) if rate.is_telling else 0.0 for rate in rates.values()]
    above = [max(0.0, rate.high - rate.value) if rate.is_telling else 0.0 for rate in rates.values()]
    axes.errorbar(list(rates), [rate.value for rate in rates.values()], [below, above], capsize=3, **look)
