"""Rates over the number of workers: where more workers stop helping; and where the time of a sample goes in one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from autotune_loader.diagnosis.ranking import Standing, ranking
from autotune_loader.diagnosis.units import rate_text, seconds_text, share_text
from autotune_loader.report.plots import canvas
from autotune_loader.results.result import TuningResult
from autotune_loader.values import StageTime

FAR_ABOVE = 1.6
"""A ceiling this many times as high as the rest would press everything else flat onto the axis."""
MOST_ROWS = 10
"""Shorter stages than these are thin lines that nobody reads."""


def plot_workers(result: TuningResult) -> canvas.Figure:
    """Rates over workers: measured with intervals, predicted, failed, and the ceiling.

    Of each number of workers the fastest configuration is shown: of those in the paired rounds, where one ran in them. Only
    what ran is a point, and only neighbours are joined.
    """
    rows = ranking(result)
    content = partial(_draw, result, rows) if any(row.rate for row in rows) else "No configuration worked."
    return canvas.picture("How many workers help", content)


def _draw(result: TuningResult, rows: tuple[Standing, ...], axes: canvas.Axes) -> None:
    # Rows come with the rounds first and the fastest of each first: the first one of a number is shown.
    shown: dict[int, Standing] = {}
    for row in (row for row in rows if row.rate is not None):
        shown.setdefault(row.config.num_workers, row)
    rates = {count: row.rate.value for count, row in shown.items() if row.rate is not None}
    failed = {row.config.num_workers for row in rows if row.rate is None} - rates.keys()
    top = max(rates.values())
    _draw_ceiling(axes, result, top)
    _draw_predicted(axes, result, rates, failed)
    for count in rates:
        if count + 1 in rates:
            axes.plot([count, count + 1], [rates[count], rates[count + 1]], color=canvas.BLUE, linewidth=1.2)
    for source, fill, label in (
        ("rounds", canvas.BLUE, "timed in turns, 95%"),
        ("search", "white", "timed once, 95%"),
    ):
        of_source = {count: row for count, row in shown.items() if row.source == source}
        _draw_rates(axes, of_source, fmt="o", color=canvas.BLUE, markerfacecolor=fill, label=label)
    own = {row.config.num_workers: row for row in rows if row.is_baseline and row.rate}
    _draw_rates(axes, own, fmt="s", color=canvas.BLACK, markersize=8, zorder=5, label="before tuning")
    best = {row.config.num_workers: row for row in rows if row.is_best and row.rate}
    label = "not decided" if result.status == "undecided" else "chosen"
    _draw_rates(axes, best, fmt="*", color=canvas.VERMILLION, markersize=15, zorder=5, label=label)
    if failed:
        axes.plot(
            sorted(failed), [0.03 * top] * len(failed), "x", color=canvas.VERMILLION, markersize=8, label="failed"
        )
    axes.set(xlabel="worker processes", ylabel=result.rate_unit.replace("/s", " per second"))
    axes.set_ylim(0, 1.12 * max(top, axes.dataLim.y1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == round(value) else f"{value:g}")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # type: ignore[call-arg, unused-ignore]


def _draw_ceiling(axes: canvas.Axes, result: TuningResult, top: float) -> None:
    if result.ceiling is None:
        return
    if result.ceiling.value > FAR_ABOVE * top:
        axes.plot([], [], " ", label=f"the step alone: {rate_text(result.ceiling.value)}, far above")
    else:
        dashed: dict[str, Any] = {"color": canvas.BLACK, "linewidth": 1.2, "linestyle": (0, (6, 3))}
        axes.axhline(result.ceiling.value, label="the step alone", **dashed)


def _draw_predicted(axes: canvas.Axes, result: TuningResult, rates: Mapping[int, float], failed: set[int]) -> None:
    """What is predicted up to the most workers that ran, and no further than what failed."""
    if result.machine is None:
        return
    most = min([max(rates), *(count - 1 for count in failed)])
    counts = range(most + 1)
    asked = [result.best.with_workers(count) for count in counts]
    predicted = [each.samples_per_s.value for each in result.predictions(asked)] if asked else []
    ahead = f", prefetch {result.best.prefetch_factor}" if result.best.prefetch_factor else ""
    axes.plot(list(counts), predicted, ":", color=canvas.PURPLE, linewidth=2, label=f"predicted{ahead}")


def _draw_rates(axes: canvas.Axes, rows: Mapping[int, Standing], **look: Any) -> None:
    """Rates with their intervals, where these tell anything."""
    rates = {count: row.rate for count, row in rows.items() if row.rate is not None}
    if rates:
        below = [max(0.0, rate.value - rate.low) if rate.is_telling else 0.0 for rate in rates.values()]
        above = [max(0.0, rate.high - rate.value) if rate.is_telling else 0.0 for rate in rates.values()]
        axes.errorbar(list(rates), [rate.value for rate in rates.values()], [below, above], capsize=3, **look)


def plot_stages(result: TuningResult) -> canvas.Figure:
    """A bar for each stage: computing, and waiting beside it, in seconds of each sample; the longest stage on top."""
    shown = result.stages[:MOST_ROWS][::-1]  # bars are drawn upwards
    content = partial(_draw_stages, shown) if shown else "No burst with workers was watched."
    return canvas.picture("Where a sample's time goes in a worker", content, height=1.6 + 0.42 * max(3, len(shown)))


def _draw_stages(stages: tuple[StageTime, ...], axes: canvas.Axes) -> None:
    names = [each.stage for each in stages]
    computing = [min(each.cpu_s, each.wall_s) * 1e3 for each in stages]
    waiting = [max(0.0, each.wall_s - each.cpu_s) * 1e3 for each in stages]
    axes.barh(names, computing, color=canvas.BLUE, label="computing")
    if any(waiting):
        axes.barh(names, waiting, left=computing, color=canvas.SKY, label="waiting, not for a core")
    for row, each in enumerate(stages):
        text = f" {share_text(each.wall_share)}, {seconds_text(each.wall_s)}  {each.where}"
        axes.text(each.wall_s * 1e3, row, text, va="center", fontsize=8, color=canvas.DARK_GREY)
    axes.set(xlabel="milliseconds for each sample", xlim=(0, 2.2 * max(each.wall_s for each in stages) * 1e3))
