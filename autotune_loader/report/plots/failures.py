"""What did not work, and why."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.report.units import counted
from autotune_loader.results.result import TuningResult
from autotune_loader.values.measurement import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """All failures of one kind."""

    kind: FailureKind
    count: int
    configs: tuple[str, ...]
    """What was tried, in order, each once."""
    message: str
    """The reason as the first of them gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresInfo:
    """What the picture shows."""

    groups: tuple[FailureGroup, ...]
    """Most frequent first."""
    trials: int
    """All trials, failed or not."""


def failures_info(result: TuningResult) -> FailuresInfo:
    """Gather what `plot_failures` draws."""
    failed = [(trial.config, trial.failure) for trial in result.trials if trial.failure is not None]
    groups = []
    for kind in dict.fromkeys(failure.kind for _, failure in failed):
        own = [(config, failure) for config, failure in failed if failure.kind == kind]
        configs = tuple(dict.fromkeys(str(config) for config, _ in own))
        groups.append(FailureGroup(kind=kind, count=len(own), configs=configs, message=own[0][1].message))
    return FailuresInfo(groups=tuple(sorted(groups, key=lambda group: -group.count)), trials=len(result.trials))


def plot_failures(result: TuningResult) -> canvas.Figure:
    """Failed trials by kind: how many, with which configurations, and the reason."""
    info = failures_info(result)
    title = f"{sum(group.count for group in info.groups)} of {counted(info.trials, 'trial')} failed"
    content = partial(_draw, info) if info.groups else "No trial failed."
    return canvas.picture(title, content, width=8.5, height=0.6 + 1.1 * max(1, len(info.groups)), legend_columns=0)


def _draw(info: FailuresInfo, axes: canvas.Axes) -> None:
    most = max(group.count for group in info.groups)
    for row, group in enumerate(info.groups):
        axes.barh(row, group.count / most, height=0.7, color=canvas.VERMILLION)
        axes.text(0.02, row, str(group.count), va="center", color="white", weight="bold", fontsize=12)
        axes.text(1.1, row - 0.36, group.kind.replace("_", " "), va="top", weight="bold")
        axes.text(1.1, row - 0.14, _reason(group), va="top", fontsize=8.5, linespacing=1.35)
    axes.set(xlim=(0, 6), ylim=(len(info.groups) - 0.5, -0.5))
    axes.set_axis_off()


def _reason(group: FailureGroup) -> str:
    tried = group.configs[0] + (f" and {len(group.configs) - 1} more" if len(group.configs) > 1 else "")
    # matplotlib reads a pair of dollars as a formula
    message = group.message.replace("$", r"\$")
    lines = textwrap.wrap(message, 70, max_lines=3, placeholder=" ...")  # the whole of it is in the frame
    return "\n".join([tried, *lines])
