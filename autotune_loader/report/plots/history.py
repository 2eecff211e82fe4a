"""The search as it went: each trial in turn, and the best so far."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import TrialRole

_ROLES: dict[TrialRole, tuple[str, str, str]] = {  # why a trial was run: marker, colour, name
    "search": ("o", canvas.BLUE, "search"),
    "default": ("D", canvas.ORANGE, "torch's defaults"),
    "baseline": ("s", canvas.BLACK, "before tuning"),
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


def plot_history(result: TuningResult) -> canvas.Figure:
    """Samples/s of each trial in the order they ran, the best so far, and crosses for those that failed."""
    info = history_info(result)
    content = (
        partial(_draw, info, result.measured.rate_unit)
        if info.measured or info.failed
        else "No configuration was tried."
    )
    return canvas.picture("The search, trial by trial", content)


def _draw(info: HistoryInfo, unit: str, axes: canvas.Axes) -> None:
    canvas.draw_ceiling(axes, info.ceiling, max((rate.value for _, _, rate in info.measured), default=0.0))
    if info.best_so_far:
        axes.step(
            *zip(*info.best_so_far, strict=True), where="post", color=canvas.GREEN, linewidth=2, label="best so far"
        )
    for role, (marker, colour, label) in _ROLES.items():
        trials = [(number, rate) for number, its_role, rate in info.measured if its_role == role]
        canvas.draw_rates(axes, trials, marker, color=colour, capsize=2, label=label)
    failed = [(number, 0.0) for number in info.failed]
    canvas.draw_points(axes, failed, "X", color=canvas.VERMILLION, markersize=9, label="failed", clip_on=False)
    canvas.label_rates(axes, "trial", unit)
    canvas.whole_numbers(axes.xaxis)
