"""What did not work, and why."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune_loader.report.plots.canvas import VERMILLION, canvas, say_nothing_to_show
from autotune_loader.report.units import counted
from autotune_loader.results.result import TuningResult
from autotune_loader.values.measurement import FailureKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MESSAGE_WIDTH = 70
"""Characters per line of a reason."""
MAX_LINES = 3
"""Lines of a reason; the whole of it is in the frame."""


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


def plot_failures(result: TuningResult) -> Figure:
    """Failed trials by kind: how many, with which configurations, and the reason."""
    info = failures_info(result)
    failed = sum(group.count for group in info.groups)
    title = f"{failed} of {counted(info.trials, 'trial')} failed"
    with canvas(title, 8.5, 0.6 + 1.1 * max(1, len(info.groups))) as (figure, axes):
        if failed:
            _draw(axes, info)
        else:
            say_nothing_to_show(axes, "No trial failed.")
    return figure


def _draw(axes: Axes, info: FailuresInfo) -> None:
    most = max(group.count for group in info.groups)
    for row, group in enumerate(info.groups):
        axes.barh(row, group.count / most, height=0.7, color=VERMILLION)
        axes.text(0.02, row, str(group.count), va="center", color="white", weight="bold", fontsize=12)
        axes.text(1.1, row - 0.36, group.kind.replace("_", " "), va="top", weight="bold")
        axes.text(1.1, row - 0.14, _reason(group), va="top", fontsize=8.5, linespacing=1.35)
    axes.set(xlim=(0, 6), ylim=(len(info.groups) - 0.5, -0.5))
    axes.set_axis_off()


def _reason(group: FailureGroup) -> str:
    tried = group.configs[0] + (f" and {len(group.configs) - 1} more" if len(group.configs) > 1 else "")
    # matplotlib reads a pair of dollars as a formula
    message = group.message.replace("$", r"\$")
    lines = textwrap.wrap(message, MESSAGE_WIDTH, max_lines=MAX_LINES, placeholder=" ...")
    return "\n".join([tried, *lines])
