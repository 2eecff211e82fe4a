"""Training as it went: samples/s over time, and where the loader changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import BatchTrace

SHORTEST_S, MOST_STEPS = 0.5, 240
"""Seconds that one step of the line covers at least, and the most steps: finer ones show single batches, not the rate."""


def plot_training(traces: Sequence[BatchTrace], changes: Sequence[tuple[int, LoaderConfig]]) -> canvas.Figure:
    """Samples/s over the seconds trained, a line at each change that says what began there.

    Args:
        traces: batches in their order, without pauses.
        changes: positions of the first batch from a pool, with its configuration.
    """
    content = partial(_draw, traces, changes) if traces else "No batch was trained yet."
    return canvas.picture("Training, and where its loader changed", content, legend_columns=0)


def _draw(traces: Sequence[BatchTrace], changes: Sequence[tuple[int, LoaderConfig]], axes: canvas.Axes) -> None:
    begun = traces[0].requested
    step_s = max(SHORTEST_S, (traces[-1].step_end - begun) / MOST_STEPS)
    samples = [0] * (math.floor((traces[-1].step_end - begun) / step_s) + 1)
    for trace in traces:
        samples[math.floor((trace.step_end - begun) / step_s)] += trace.samples
    whole = samples[:-1] or samples  # the last step is not over
    rates, edges = [count / step_s for count in whole], [index * step_s for index in range(len(whole) + 1)]
    axes.stairs(rates, edges, baseline=None, color=canvas.BLUE, linewidth=1.6)
    latest = None
    for position, config in changes:
        if config.key() == latest or not 0 <= position < len(traces):
            continue
        latest, second = config.key(), traces[position].requested - begun
        axes.axvline(second, color=canvas.GREY, linewidth=0.8)
        workers = f"{config.num_workers} x {config.prefetch_factor}" if config.num_workers else "0"
        text = axes.text(second, 0.03, f" {workers}", transform=axes.get_xaxis_transform())
        text.set(fontsize=8, rotation=90, color=canvas.DARK_GREY)
    canvas.label_rates(axes, "seconds of training (numbers: workers x batches ahead of each)")
