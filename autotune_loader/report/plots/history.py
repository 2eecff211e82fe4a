"""The search as it went: each trial in turn, and the best so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune_loader.report.plots.canvas import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    VERMILLION,
    canvas,
    draw_ceiling,
    error_bars,
    legend_below,
    say_nothing_to_show,
    thousands,
    whole_numbers,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import TrialRole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROLES: dict[TrialRole, tuple[str, str, str]] = {
    "search": ("o", BLUE, "search"),
    "default": ("D", ORANGE, "torch's defaults"),
    "baseline": ("s", BLACK, "before tuning"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryInfo:
    """What the picture shows."""

    measured: tuple[tuple[int, TrialRole, Interval], ...]
    """(trial, why it was tried, samples/s)."""
    best_so_far: tuple[tuple[int, float], ...]
    failed: tuple[int, ...]
    """Trials that failed."""
    ceiling: Interval | None


def history_info(result: TuningResult) -> HistoryInfo:
    """Gather what `plot_history` draws."""
    best_so_far: list[tuple[int, float]] = []
    for trial in result.trials:
        before = best_so_far[-1][1] if best_so_far else 0.0
        rate = trial.samples_per_s or 0.0
        if max(before, rate) > 0:
            best_so_far.append((trial.number, max(before, rate)))
    return HistoryInfo(
        measured=tuple((t.number, t.role, t.measurement.samples_per_s) for t in result.trials if t.measurement),
        best_so_far=tuple(best_so_far),
        failed=tuple(trial.number for trial in result.trials if trial.failure),
        ceiling=result.ceiling,
    )


def plot_history(result: TuningResult) -> Figure:
    """Samples/s of each trial in the order they ran, the best so far, and crosses for those that failed."""
    info = history_info(result)
    with canvas("The search, trial by trial") as (figure, axes):
        if info.measured or info.failed:
            _draw(axes, info)
            legend_below(figure)
        else:
            say_nothing_to_show(axes, "No configuration was tried.")
    return figure


def _draw(axes: Axes, info: HistoryInfo) -> None:
    draw_ceiling(axes, info.ceiling, max((rate.value for _, _, rate in info.measured), default=0.0))
    if info.best_so_far:
        axes.step(*zip(*info.best_so_far, strict=True), where="post", color=GREEN, linewidth=2, label="best so far")
    for role, (marker, colour, label) in _ROLES.items():
        trials = [(number, rate) for number, its_role, rate in info.measured if its_role == role]
        if trials:
            numbers, rates = zip(*trials, strict=True)
            values = [rate.value for rate in rates]
            axes.errorbar(numbers, values, error_bars(list(rates)), fmt=marker, color=colour, capsize=2, label=label)
    if info.failed:
        axes.plot(
            info.failed, [0] * len(info.failed), "X", color=VERMILLION, markersize=9, label="failed", clip_on=False
        )
    axes.set(xlabel="trial", ylabel="samples per second", ylim=(0, None))
    whole_numbers(axes.xaxis)
    thousands(axes.yaxis)
