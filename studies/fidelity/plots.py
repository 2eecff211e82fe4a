"""Pictures of the fidelity study: predicted against sustained rates, by workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.fidelity.analysis import Cell
from studies.fidelity.grid import WORKLOAD_NAMES

COLOURS = {1: "tab:red", 2: "tab:blue", 4: "tab:green", 8: "tab:purple"}


def draw(found: Sequence[Cell], folder: Path) -> None:
    """`fidelity.png`: one panel per workload, points are sustained runs, lines with bands the twin of the first scouts."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7), constrained_layout=True)
    for name, panel in zip(WORKLOAD_NAMES, axes.flat, strict=True):
        _panel(panel, name, [cell for cell in found if cell.task.workload == name and cell.repeat == 0])
    axes[0, 0].legend(title="prefetch", fontsize=8)
    figure.supxlabel("workers")
    figure.supylabel("samples/s (points: sustained; lines: predicted from three bursts)")
    figure.savefig(folder / "fidelity.png", dpi=80)
    pyplot.close(figure)


def _panel(panel: Any, name: str, found: Sequence[Cell]) -> None:
    panel.set_title(name, fontsize=10)
    for prefetch, colour in COLOURS.items():
        line = sorted(
            (cell for cell in found if cell.task.prefetch_factor == prefetch), key=lambda cell: cell.task.num_workers
        )
        if not line:
            continue
        workers = [cell.task.num_workers for cell in line]
        rates = [cell.prediction.samples_per_s for cell in line]
        panel.plot(workers, [rate.value for rate in rates], color=colour, label=str(prefetch))
        panel.fill_between(
            workers, [rate.low for rate in rates], [rate.high for rate in rates], color=colour, alpha=0.15, linewidth=0
        )
        panel.plot(workers, [cell.truth for cell in line], "o", color=colour, markersize=4)
    for cell in found:
        if cell.task.num_workers == 0:
            panel.plot(0, cell.truth, "ko", markersize=4)
            panel.plot(0, cell.prediction.samples_per_s.value, "kx")
    panel.set_ylim(bottom=0)
