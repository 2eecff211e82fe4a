"""Workers against prefetch_factor: which corner of the space was measured, and how fast it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import Standing, predicted_rates, standings
from autotune_loader.report.units import number_text
from autotune_loader.results.result import TuningResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pair of workers and prefetch_factor."""

    workers: int
    prefetch_factor: int | None
    """None without workers."""
    state: Literal["measured", "failed", "untried", "impossible"]
    samples_per_s: float | None = None
    """As the table has it: of the chosen configuration in its own cell, else of the fastest of the pair."""
    predicted_samples_per_s: float | None = None
    """What the twin says of an untried pair, with the chosen configuration's other settings."""
    is_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapInfo:
    """What the picture shows."""

    workers: tuple[int, ...]
    """Columns."""
    prefetch_factors: tuple[int | None, ...]
    """Rows, from below; None first where 0 workers were tried."""
    cells: tuple[Cell, ...]
    """One per column and row."""


def heatmap_info(result: TuningResult) -> HeatmapInfo:
    """Gather what `plot_heatmap` draws."""
    known = standings(result)
    workers = tuple(sorted({row.config.num_workers for row in known}))
    ahead = sorted({row.config.prefetch_factor for row in known if row.config.prefetch_factor is not None})
    rows = ((None,) if 0 in workers else ()) + tuple(ahead)
    cells = [_cell(known, column, ahead) for ahead in rows for column in workers]
    return HeatmapInfo(workers=workers, prefetch_factors=rows, cells=tuple(_predicted(cells, result)))


def _predicted(cells: list[Cell], result: TuningResult) -> list[Cell]:
    """The cells, the untried ones with what the twin predicts where it can."""
    untried = [cell for cell in cells if cell.state == "untried"]
    configs = [result.best.with_workers(cell.workers, cell.prefetch_factor) for cell in untried]
    rates = dict(zip(untried, predicted_rates(result, configs), strict=False))
    return [replace(cell, predicted_samples_per_s=rates.get(cell)) for cell in cells]


def _cell(rows: Sequence[Standing], workers: int, ahead: int | None) -> Cell:
    here = [row for row in rows if (row.config.num_workers, row.config.prefetch_factor) == (workers, ahead)]
    is_best = any(row.is_best for row in here)
    rates = [row.rate.value for row in here if row.rate is not None and (row.is_best or not is_best)]
    if rates:
        return Cell(workers=workers, prefetch_factor=ahead, state="measured", samples_per_s=max(rates), is_best=is_best)
    is_legal = (workers == 0) == (ahead is None)
    state: Literal["failed", "untried", "impossible"] = "failed" if here else "untried" if is_legal else "impossible"
    return Cell(workers=workers, prefetch_factor=ahead, state=state, is_best=is_best)


def plot_heatmap(result: TuningResult) -> canvas.Figure:
    """The fastest of each pair of workers and prefetch_factor; hatched, with a prediction, where there is none."""
    info = heatmap_info(result)
    is_measured = any(cell.state == "measured" for cell in info.cells)
    return canvas.picture(
        "Samples/s by workers and prefetch_factor",
        partial(_draw, info) if is_measured else "No configuration worked, so there is no rate to show.",
        width=1.6 + 0.8 * max(7, len(info.workers)),  # wide enough for the label below
        height=1.5 + 0.55 * max(2, len(info.prefetch_factors)),
        legend_columns=0,
    )


def _draw(info: HeatmapInfo, axes: canvas.Axes) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    top = max(cell.samples_per_s or 0.0 for cell in info.cells)
    norm, colours = Normalize(0, top), colormaps["cividis"]
    axes.grid(visible=False)
    for cell in info.cells:
        position = info.workers.index(cell.workers), info.prefetch_factors.index(cell.prefetch_factor)
        share = norm(cell.samples_per_s) if cell.samples_per_s is not None else None
        _draw_cell(axes, cell, position, None if share is None else colours(share), is_dark=(share or 0.0) < 0.5)
    axes.set(xlim=(-0.5, len(info.workers) - 0.5), ylim=(-0.5, len(info.prefetch_factors) - 0.5))
    axes.set_xticks(range(len(info.workers)), [str(each) for each in info.workers])
    axes.set_yticks(range(len(info.prefetch_factors)), ["none" if a is None else str(a) for a in info.prefetch_factors])
    axes.set(xlabel="worker processes (frame: chosen, hatched ~: predicted, not measured)", ylabel="prefetch_factor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_cell(
    axes: canvas.Axes, cell: Cell, position: tuple[int, int], colour: tuple[float, ...] | None, *, is_dark: bool
) -> None:
    from matplotlib.patches import Rectangle

    if cell.state == "impossible":
        return
    corner = position[0] - 0.47, position[1] - 0.45
    look = {"facecolor": colour, "edgecolor": "none"} if colour else {"facecolor": "none", "edgecolor": canvas.GREY}
    axes.add_patch(Rectangle(corner, 0.94, 0.9, linewidth=0.5, hatch=None if colour else "////", **look))
    if cell.is_best:
        axes.add_patch(Rectangle(corner, 0.94, 0.9, facecolor="none", edgecolor=canvas.VERMILLION, linewidth=3))
    if cell.samples_per_s is not None:
        axes.text(*position, number_text(cell.samples_per_s), ha="center", va="center", color="w" if is_dark else "k")
        return
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    if cell.state == "failed":
        axes.text(*position, "failed", ha="center", va="center", color=canvas.VERMILLION, bbox=box)
    elif cell.predicted_samples_per_s is not None:
        text = f"~{number_text(cell.predicted_samples_per_s)}"
        axes.text(*position, text, ha="center", va="center", color=canvas.DARK_GREY, style="italic", bbox=box)
