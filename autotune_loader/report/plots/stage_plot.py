"""Where the time of a sample goes in a worker."""

from __future__ import annotations

from functools import partial

from autotune_loader.diagnosis.units import seconds_text, share_text
from autotune_loader.report.plots import canvas
from autotune_loader.results.result import TuningResult
from autotune_loader.values.stages import StageTime

MOST_ROWS = 10
"""Shorter stages than these are thin lines that nobody reads."""


def plot_stages(result: TuningResult) -> canvas.Figure:
    """A bar for each stage: computing, and waiting beside it, in seconds of each sample; the longest stage on top."""
    shown = result.stages[:MOST_ROWS][::-1]  # bars are drawn upwards
    content = partial(_draw, shown) if shown else "No burst with workers was watched."
    return canvas.picture("Where a sample's time goes in a worker", content, height=1.6 + 0.42 * max(3, len(shown)))


def _draw(stages: tuple[StageTime, ...], axes: canvas.Axes) -> None:
    names = [each.stage for each in stages]
    computing = [min(each.cpu_s, each.wall_s) * 1e3 for each in stages]
    waiting = [max(0.0, each.wall_s - each.cpu_s) * 1e3 for each in stages]
    axes.barh(names, computing, color=canvas.BLUE, label="computing")
    if any(waiting):
        axes.barh(names, waiting, left=computing, color=canvas.SKY, label="waiting")
    for row, each in enumerate(stages):
        text = f" {share_text(each.wall_share)}, {seconds_text(each.wall_s)}  {each.where}"
        axes.text(each.wall_s * 1e3, row, text, va="center", fontsize=8, color=canvas.DARK_GREY)
    axes.set(xlabel="milliseconds for each sample", xlim=(0, 2.2 * max(each.wall_s for each in stages) * 1e3))
