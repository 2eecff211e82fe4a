"""Workers against prefetch_factor: which corner of the space was measured, and how fast it was."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import Standing, predicted_rates, standings
from autotune_loader.report.units import number_text
from autotune_loader.results.result import TuningResult


def plot_heatmap(result: TuningResult) -> canvas.Figure:
    """The fastest of each pair of workers and prefetch_factor; hatched, with a prediction, where there is none."""
    rows = standings(result)
    workers = sorted({row.config.num_workers for row in rows})
    ahead = sorted({row.config.prefetch_factor for row in rows}, key=lambda depth: depth or 0)  # None: without workers
    nothing = "No configuration worked, so there is no rate to show."
    return canvas.picture(
        "Samples/s by workers and prefetch_factor",
        partial(_draw, result, rows, workers, ahead) if any(row.rate for row in rows) else nothing,
        width=1.6 + 0.8 * max(7, len(workers)),  # wide enough for the label below
        height=1.5 + 0.55 * max(2, len(ahead)),
        legend_columns=0,
    )


def _draw(
    result: TuningResult, rows: tuple[Standing, ...], workers: list[int], ahead: list[int | None], axes: canvas.Axes
) -> None:
    top = max(row.rate.value for row in rows if row.rate is not None)
    axes.grid(visible=False)
    tried = defaultdict[tuple[int, int | None], list[Standing]](list)
    for row in rows:
        tried[row.config.num_workers, row.config.prefetch_factor].append(row)
    cells = [pair for pair in product(workers, ahead) if (pair[0] == 0) == (pair[1] is None)]
    untried = [pair for pair in cells if pair not in tried]
    guesses = dict(
        zip(untried, predicted_rates(result, [result.best.with_workers(*pair) for pair in untried]), strict=False)
    )
    for pair in cells:
        place = workers.index(pair[0]), ahead.index(pair[1])
        # The chosen one in its own cell, else the fastest of the pair.
        chosen = [row for row in tried.get(pair, []) if row.is_best]
        rates = [row.rate.value for row in chosen or tried.get(pair, []) if row.rate is not None]
        guess = f"~{number_text(guesses[pair])}" if pair in guesses else ""
        text = number_text(max(rates)) if rates else "failed" if pair in tried else guess
        _draw_cell(axes, place, max(rates) / top if rates else None, text, is_best=bool(chosen))
    axes.set(xlim=(-0.5, len(workers) - 0.5), ylim=(-0.5, len(ahead) - 0.5))
    axes.set_xticks(range(len(workers)), [str(each) for each in workers])
    axes.set_yticks(range(len(ahead)), ["none" if depth is None else str(depth) for depth in ahead])
    axes.set(xlabel="worker processes (frame: chosen, hatched ~: predicted, not measured)", ylabel="prefetch_factor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_cell(
    axes: canvas.Axes, place: tuple[int, int], share: float | None, text: str, *, is_best: bool = False
) -> None:
    """One pair: coloured by its share of the highest rate, or hatched where it has none."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    corner = place[0] - 0.47, place[1] - 0.45
    fill: dict[str, Any] = {"facecolor": "none", "edgecolor": canvas.GREY, "hatch": "////"}
    words: dict[str, Any] = {"color": canvas.VERMILLION if text == "failed" else canvas.DARK_GREY}
    if share is not None:
        fill = {"facecolor": colormaps["cividis"](share), "edgecolor": "none"}
        words = {"color": "w" if share < 0.5 else "k"}
    elif text:
        words |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}}
    axes.add_patch(Rectangle(corner, 0.94, 0.9, linewidth=0.5, **fill))
    if is_best:
        axes.add_patch(Rectangle(corner, 0.94, 0.9, facecolor="none", edgecolor=canvas.VERMILLION, linewidth=3))
    axes.text(*place, text, ha="center", va="center", **words)
