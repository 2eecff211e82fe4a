"""Rates over the number of workers: where more workers stop helping; and where the time of a sample goes in one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from autotune_loader.diagnosis.ranking import Standing, ranking
from autotune_loader.diagnosis.units import counted, number_text, rate_text, ratio_text, seconds_text, share_text
from autotune_loader.report.plots import canvas
from autotune_loader.report.table import tail_of
from autotune_loader.results.result import TuningResult
from autotune_loader.values import StageTime

FAR = 1.6
"""A ceiling this many times as high as the rest, or a failure as far to the right, would press everything else together."""
MOST_ROWS = 10
"""Shorter stages than these are thin lines that nobody reads."""
LONGEST_NAME = 36
"""Of a function or its place, whose end tells most."""


def plot_workers(result: TuningResult) -> canvas.Figure:
    """Rates over workers: measured with intervals, chosen, failed, and the ceiling.

    Only what ran is a point, one for each number of workers: the chosen configuration's, or else the fastest in the paired
    rounds, or else the fastest of the search.
    """
    rows = ranking(result)
    content = partial(_draw, result, rows) if any(row.rate for row in rows) else "No configuration worked."
    return canvas.picture("How many workers help", content)


def _draw(result: TuningResult, rows: tuple[Standing, ...], axes: canvas.Axes) -> None:
    # Rows come with the rounds first and the fastest of each first.
    shown: dict[int, Standing] = {}
    for row in sorted((row for row in rows if row.rate), key=lambda row: not row.is_best):
        shown.setdefault(row.config.num_workers, row)
    rates = {count: row.rate.value for count, row in sorted(shown.items()) if row.rate}
    top = max(rates.values())
    _draw_ceiling(axes, result, top)
    axes.plot(list(rates), list(rates.values()), color=canvas.BLUE, linewidth=1.2)
    for source, fill, label in (
        ("rounds", canvas.BLUE, "A/B rounds, 95%"),
        ("search", "white", "single trial, 95%"),
    ):
        of_source = [row for row in shown.values() if row.source == source]
        _draw_rates(axes, of_source, fmt="o", color=canvas.BLUE, markerfacecolor=fill, label=label)
    own, best = [row for row in rows if row.is_baseline], [row for row in rows if row.is_best]
    _draw_rates(axes, own, fmt="s", color=canvas.BLACK, markersize=8, zorder=5, label="before tuning")
    label = "chosen" if result.status == "complete" else "so far"
    _draw_rates(axes, best, fmt="*", color=canvas.VERMILLION, markersize=15, zorder=5, label=label)
    if failed := sorted({row.config.num_workers for row in rows if row.rate is None} - rates.keys()):
        near = [count for count in failed if count <= FAR * (1 + max(rates))]
        label = f"failed: {', '.join(map(str, failed))} workers"
        axes.plot(near, [0.03 * top] * len(near), "x", color=canvas.VERMILLION, markersize=8, label=label)
    axes.set(xlabel="worker processes", ylabel=result.rate_unit.replace("/s", " per second"))
    axes.set_ylim(0, 1.25 * max(top, axes.dataLim.y1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == round(value) else f"{value:g}")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # type: ignore[call-arg, unused-ignore]
    for row in best:
        _tell(axes, row, result)


def _tell(axes: canvas.Axes, row: Standing, result: TuningResult) -> None:
    """The chosen configuration's rate and speedup in words, above all that is drawn."""
    if row.rate is None:
        return
    count = row.config.num_workers
    words = f"{counted(count, 'worker')}: {number_text(row.rate.value)} {result.rate_unit}"
    if result.speedup is not None:
        words += f"\n{ratio_text(result.speedup)} as fast as before"
    side, at = ("left", 0) if 2 * count <= sum(axes.get_xlim()) else ("right", 1)
    line = {"arrowstyle": "-", "color": canvas.VERMILLION, "linewidth": 0.8, "relpos": (at, 0)}
    look: dict[str, Any] = {"color": canvas.VERMILLION, "fontsize": 9, "ha": side, "va": "top", "arrowprops": line}
    axes.annotate(words, (count, row.rate.value), (count, axes.get_ylim()[1]), **look)


def _draw_ceiling(axes: canvas.Axes, result: TuningResult, top: float) -> None:
    if result.ceiling is None:
        return
    if result.ceiling.value > FAR * top:
        axes.plot([], [], " ", label=f"the step alone: {rate_text(result.ceiling.value)}, far above")
    else:
        dashed: dict[str, Any] = {"color": canvas.BLACK, "linewidth": 1.2, "linestyle": (0, (6, 3))}
        axes.axhline(result.ceiling.value, label="the step alone", **dashed)


def _draw_rates(axes: canvas.Axes, rows: Sequence[Standing], **look: Any) -> None:
    """Rates with their intervals, where these tell anything."""
    rates = {row.config.num_workers: row.rate for row in rows if row.rate is not None}
    if rates:
        below = [max(0.0, rate.value - rate.low) if rate.is_telling else 0.0 for rate in rates.values()]
        above = [max(0.0, rate.high - rate.value) if rate.is_telling else 0.0 for rate in rates.values()]
        axes.errorbar(list(rates), [rate.value for rate in rates.values()], [below, above], capsize=3, **look)


def plot_stages(result: TuningResult) -> canvas.Figure:
    """A bar for each stage: its self time for each sample, computing and waiting beside it; the longest stage on top."""
    shown = result.stages[:MOST_ROWS][::-1]  # bars are drawn upwards
    content = partial(_draw_stages, shown) if shown else "No trial with workers was recorded."
    return canvas.picture("Where a sample's time goes in a worker", content, height=1.6 + 0.42 * max(3, len(shown)))


def _draw_stages(stages: tuple[StageTime, ...], axes: canvas.Axes) -> None:
    rows = range(len(stages))
    computing = [min(each.cpu_s, each.wall_s) * 1e3 for each in stages]
    waiting = [each.waited_s * 1e3 for each in stages]
    axes.barh(rows, computing, color=canvas.BLUE, label="computing")
    if any(waiting):
        label = "waiting (I/O, a lock; in some sandboxes a core)"
        axes.barh(rows, waiting, left=computing, color=canvas.SKY, label=label)
    for row, each in enumerate(stages):
        text = f" {share_text(each.wall_share)}, {seconds_text(each.wall_s)}"
        axes.text(each.wall_s * 1e3, row, text, va="center", fontsize=8, color=canvas.DARK_GREY)
    axes.set_yticks(
        rows,
        [f"{tail_of(each.stage, LONGEST_NAME)}\n{tail_of(each.where, LONGEST_NAME)}" for each in stages],
        fontsize=8,
    )
    longest_s = max(each.wall_s for each in stages)
    axes.set(xlabel="milliseconds of self time for each sample\n(without other stages that it calls)")
    axes.set_xlim(0, 1.3 * longest_s * 1e3)
