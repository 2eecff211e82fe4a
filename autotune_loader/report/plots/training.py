"""Training as it went: samples/s over time, and where the loader changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import BatchTrace

SHORTEST_S, MOST_STEPS = 0.5, 240
"""Seconds that one step of the line covers at least, and the most steps: finer ones show single batches, not the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInfo:
    """What the picture shows; seconds count from the first batch that is shown, pauses apart."""

    rates: tuple[tuple[float, float], ...]
    """(second, samples/s from there to the next)."""
    changes: tuple[tuple[float, LoaderConfig], ...]
    """When another configuration began to deliver."""
    ended_s: float


def training_info(traces: Sequence[BatchTrace], changes: Sequence[tuple[int, LoaderConfig]]) -> TrainingInfo:
    """Gather what `plot_training` draws.

    Args:
        traces: batches in their order, without pauses.
        changes: positions of the first batch from a pool, with its configuration.
    """
    if not traces:
        return TrainingInfo(rates=(), changes=(), ended_s=0.0)
    begun = traces[0].requested
    ends = [trace.step_end - begun for trace in traces]
    step_s = max(SHORTEST_S, ends[-1] / MOST_STEPS)
    samples = [0] * (math.floor(ends[-1] / step_s) + 1)
    for trace, end in zip(traces, ends, strict=True):
        samples[math.floor(end / step_s)] += trace.samples
    whole = samples[:-1] or samples  # the last step is not over
    shown, latest = list[tuple[float, LoaderConfig]](), None
    for position, config in changes:
        if config.key() != latest and 0 <= position < len(traces):
            shown.append((traces[position].requested - begun, config))
            latest = config.key()
    return TrainingInfo(
        rates=tuple((index * step_s, count / step_s) for index, count in enumerate(whole)),
        changes=tuple(shown),
        ended_s=max(ends[-1], step_s) if whole is samples else len(whole) * step_s,
    )


def plot_training(info: TrainingInfo) -> canvas.Figure:
    """Samples/s over the seconds trained, a line at each change that says what began there."""
    content = partial(_draw, info) if info.rates else "No batch was trained yet."
    return canvas.picture("Training, and where its loader changed", content, legend_columns=0)


def _draw(info: TrainingInfo, axes: canvas.Axes) -> None:
    seconds, rates = zip(*info.rates, strict=True)
    axes.stairs(rates, [*seconds, info.ended_s], baseline=None, color=canvas.BLUE, linewidth=1.6)
    for second, config in info.changes:
        workers = f"{config.num_workers} x {config.prefetch_factor}" if config.num_workers else "0"
        axes.axvline(second, color=canvas.GREY, linewidth=0.8)
        axes.annotate(
            workers,
            (second, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(2, 0),
            textcoords="offset points",
            fontsize=8,
            rotation=90,
            color=canvas.DARK_GREY,
        )
    canvas.label_rates(axes, "seconds of training (numbers: workers x batches ahead of each)")
