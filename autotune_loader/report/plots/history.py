"""The search as it went: each trial in turn, and the best so far."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from autotune_loader.report.plots import canvas
from autotune_loader.results.result import TuningResult
from autotune_loader.values.trial import TrialRole

_ROLES: dict[TrialRole, tuple[str, str, str]] = {  # why a trial was run: marker, colour, name
    "search": ("o", canvas.BLUE, "search"),
    "default": ("D", canvas.ORANGE, "torch's defaults"),
    "baseline": ("s", canvas.BLACK, "before tuning"),
}


def plot_history(result: TuningResult) -> canvas.Figure:
    """Samples/s of each trial in the order they ran, the best so far, and crosses for those that failed."""
    content = partial(_draw, result) if result.trials else "No configuration was tried."
    return canvas.picture("The search, trial by trial", content)


def _draw(result: TuningResult, axes: canvas.Axes) -> None:
    rates = [trial.samples_per_s or 0.0 for trial in result.trials]
    best_so_far = list(accumulate(rates, max))
    canvas.draw_ceiling(axes, result.ceiling, best_so_far[-1])
    steps = [(trial.number, best) for trial, best in zip(result.trials, best_so_far, strict=True) if best > 0]
    look: dict[str, Any] = {"drawstyle": "steps-post", "color": canvas.GREEN, "linewidth": 2}
    canvas.draw_points(axes, steps, "-", label="best so far", **look)
    for role, (marker, colour, label) in _ROLES.items():
        measured = [(t.number, t.measurement.samples_per_s) for t in result.trials if t.role == role and t.measurement]
        canvas.draw_rates(axes, measured, marker, color=colour, capsize=2, label=label)
    failed = [(trial.number, 0.0) for trial in result.trials if trial.failure]
    canvas.draw_points(axes, failed, "X", color=canvas.VERMILLION, markersize=9, label="failed", clip_on=False)
    canvas.label_rates(axes, "trial", result.measured.rate_unit)
    canvas.whole_numbers(axes.xaxis)
