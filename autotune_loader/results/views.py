"""What a result shows of itself: each view is one line to `report`, which is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Views:
    """Frames, texts and pictures of a `TuningResult`."""

    __slots__ = ()

    def to_dataframe(self: Any) -> pd.DataFrame:
        """One row per trial: configuration, rates, waits, memory, failure."""
        from autotune_loader.report.frame import trials_frame

        return trials_frame(self)

    def stages(self: Any) -> pd.DataFrame:
        """Where the time of a sample goes in a worker: one row per stage, the longest first.

        Columns: stage, where (the user's line, and what it calls), wall_share and cpu_share (each adds up to 1), wall_s and
        cpu_s (for each sample). Without a row where nothing was watched: `stages=False`, or no burst with workers.
        """
        from autotune_loader.report.frame import stages_frame

        return stages_frame(self)

    def report(self: Any) -> str:
        """The whole result as text: table, verdict, advice."""
        from autotune_loader.report.tables import render_report

        return render_report(self)

    def plot_workers(self: Any) -> Figure:
        """Samples/s over workers with intervals, plateau, ceiling and the twin's predictions."""
        from autotune_loader.report.plots import plot_workers

        return plot_workers(self)

    def plot_timeline(self: Any, trial: int | None = None) -> Figure:
        """One burst, batch by batch: what each worker fetched, and when the loop waited and stepped.

        Args:
            trial: number of the trial; None takes the chosen configuration's last burst.
        """
        from autotune_loader.report.plots import plot_timeline

        return plot_timeline(self, trial)

    def plot_stages(self: Any) -> Figure:
        """Where the time of a sample goes in a worker: computing and waiting of each stage."""
        from autotune_loader.report.plots import plot_stages

        return plot_stages(self)

    def plot_speedup(self: Any) -> Figure:
        """The paired rounds of the finals behind the speed-up."""
        from autotune_loader.report.plots import plot_speedup

        return plot_speedup(self)

    def _repr_html_(self: Any) -> str:
        from autotune_loader.report.page import render_cell

        return render_cell(self)
