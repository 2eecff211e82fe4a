"""The proof: how many times as fast, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import final_ratios
from autotune_loader.report.units import ratio_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval

_COLOURS = (canvas.BLUE, canvas.VERMILLION, canvas.GREEN, canvas.PURPLE, canvas.ORANGE, canvas.SKY)
Ratios = Mapping[str, tuple[Sequence[tuple[int, float]], Interval | None]]
"""By name: (round from 0, times as fast) of each round, and their mean."""


def plot_speedup(result: TuningResult) -> canvas.Figure:
    """The speed-up in each paired round, with its mean and interval; 1 means no faster than before tuning."""
    is_changed = result.best != result.baseline
    ratios = final_ratios(result.finals, result.best, result.baseline) if is_changed else []
    nothing = "No paired rounds were run, or the configuration before tuning is the best."
    found: Ratios = {"chosen": (ratios, result.speedup)} if ratios else {}
    return plot_ratios("Speed-up over the configuration before tuning", found, len(result.finals.rounds), nothing)


def plot_ratios(title: str, ratios: Ratios, rounds: int, nothing: str) -> canvas.Figure:
    """A dot for each paired round and side, a line for each mean, a band for its interval; `nothing` where there are none."""
    content = partial(_draw, ratios, rounds) if ratios else nothing
    return canvas.picture(title, content, height=3.4)


def _draw(ratios: Ratios, rounds: int, axes: canvas.Axes) -> None:
    axes.axhline(1, color=canvas.BLACK, linewidth=1, linestyle=(0, (6, 3)), label="no faster")
    top = 1.0
    for colour, (name, (points, mean)) in zip(_COLOURS * len(ratios), ratios.items(), strict=False):
        if points:
            numbers, values = zip(*points, strict=True)
            axes.plot([number + 1 for number in numbers], values, "o", color=colour, label=f"{name}, a round")
        top = max([top, *(ratio for _, ratio in points)])
        if mean is None:
            continue
        certainty = ", 95 %" if mean.is_telling else ""
        axes.axhline(mean.value, color=colour, linewidth=2, label=f"{name}, mean {ratio_text(mean)}{certainty}")
        if mean.is_telling:
            axes.axhspan(mean.low, mean.high, color=colour, alpha=0.2, linewidth=0)
            top = max(top, mean.high)
    axes.set(xlabel="paired round", ylabel="times as fast", ylim=(0, top * 1.15), xlim=(0.5, rounds + 0.5))
    axes.set_xticks(range(1, rounds + 1, 1 + rounds // 20))
