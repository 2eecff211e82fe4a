"""The proof: how many times as fast, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import final_ratios
from autotune_loader.report.units import ratio_text
from autotune_loader.results.result import TuningResult


def plot_speedup(result: TuningResult) -> canvas.Figure:
    """The speed-up in each paired round, with its mean and interval; 1 means no faster than before tuning."""
    is_changed = result.best != result.baseline
    ratios = final_ratios(result.finals, result.best, result.baseline) if is_changed else []
    nothing = "No paired rounds were run, or the configuration before tuning is the best."
    content = partial(_draw, result, ratios) if ratios else nothing
    return canvas.picture("Speed-up over the configuration before tuning", content, height=3.4)


def _draw(result: TuningResult, ratios: Sequence[tuple[int, float]], axes: canvas.Axes) -> None:
    axes.axhline(1, color=canvas.BLACK, linewidth=1, linestyle=(0, (6, 3)), label="no faster")
    numbers, values = zip(*ratios, strict=True)
    axes.plot([number + 1 for number in numbers], values, "o", color=canvas.BLUE, label="chosen, a round")
    mean, rounds, top = result.speedup, len(result.finals.rounds), max(1.0, *values)
    if mean is not None:
        certainty = ", 95 %" if mean.is_telling else ""
        axes.axhline(mean.value, color=canvas.BLUE, linewidth=2, label=f"chosen, mean {ratio_text(mean)}{certainty}")
    if mean is not None and mean.is_telling:
        axes.axhspan(mean.low, mean.high, color=canvas.BLUE, alpha=0.2, linewidth=0)
        top = max(top, mean.high)
    axes.set(xlabel="paired round", ylabel="times as fast", ylim=(0, top * 1.15), xlim=(0.5, rounds + 0.5))
    axes.set_xticks(range(1, rounds + 1, 1 + rounds // 20))
