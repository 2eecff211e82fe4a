"""The public results: the records of `results` with the methods that show them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autotune_loader.report import frames, plots, text
from autotune_loader.results.comparison import ComparisonRecord
from autotune_loader.results.record import TuningRecord
from autotune_loader.values import MissingExtraError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_PAGE = """<!doctype html><meta charset="utf-8"><title>autotune_loader</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
pre {{ overflow-x: auto; font-size: 13px }} img {{ max-width: 100% }}</style>
<h1>DataLoader settings</h1><pre>{report}</pre>{pictures}
<h2>For the training script</h2><pre>{arguments}</pre>
"""
_PAGE_WIDTH = 110
"""Columns of a report that fit into the page's width."""


class TuningResult(TuningRecord):
    """The result of `tune()`, of an AutoLoader, or of `watch`.

    `TuningResult.load(path)` equals the result that was saved. The file does not have the study, the times of single
    batches, and the objects of the tuned loader that `make_loader()` uses. Pictures need matplotlib; without it they
    raise `MissingExtraError`.
    """

    __slots__ = ()

    @property
    def summary(self) -> tuple[str, ...]:
        """The settings to use, the speedup, the bottleneck, why the search ended, and warnings: a sentence each."""
        return tuple(text.sentences_of(self))

    def report(self) -> str:
        """The result as text, 80 columns wide: table, bottleneck, stages, advice, warnings."""
        return text.report_of(self)

    def to_dataframe(self, of: Literal["trials", "stages"] = "trials") -> pd.DataFrame:
        """Return one row per trial, or `"stages"` for one row per stage of a sample in a worker.

        Units are in the names: `_s` seconds, `_bytes` bytes, `_share` 0 to 1. The columns are always the same.
        """
        return frames.stages_frame(self) if of == "stages" else frames.trials_frame(self)

    def plot_workers(self) -> Figure:
        """Plot rates over the number of workers, with intervals, the chosen setting and the ceilings."""
        return plots.plot_workers(self)

    def plot_stages(self) -> Figure:
        """Plot the self time of each stage of a sample in a worker: CPU time and waiting."""
        return plots.plot_stages(self)

    def plot_timeline(self, trial: int | None = None) -> Figure:
        """Plot the last batches of one trial: what each worker loaded, and when the training loop waited and stepped.

        Args:
            trial: Number of the trial; by default the last one with the chosen setting.

        Raises:
            ValueError: There is no such trial, it failed, or the result was loaded from a file, which has no single
                batches.
        """
        return plots.plot_timeline(self, trial)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with the report and the pictures; it needs no other file.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        page = _PAGE.format(
            report=escape(text.report_of(self, _PAGE_WIDTH)),
            pictures="".join(_pictures(self)),
            arguments=escape(json.dumps(self.best.to_kwargs(), indent=2)),
        )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")

    def _repr_html_(self) -> str:
        """For notebooks: what to use, the table and, with matplotlib, the pictures."""
        try:
            pictures = "".join(_pictures(self))
        except MissingExtraError:
            pictures = ""
        return f"<pre>{escape(str(self))}\n\n{escape(text.configurations_of(self))}</pre>{pictures}"

    def __str__(self) -> str:
        return text.summary_of(self)


class Comparison(ComparisonRecord):
    """The result of `compare()`: each side beside the first.

    If the first side failed, the next one that worked takes its place. All intervals together hold with 95% confidence:
    with m sides beside the first, each has an error of 5% / m (Bonferroni). They hold at any stopping time.
    """

    __slots__ = ()

    def report(self) -> str:
        """The table of the sides and the conclusions as text, 80 columns wide."""
        return text.comparison_report(self)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per side: settings, rate and ratio with their limits, shares, bytes, bottleneck, error."""
        return frames.sides_frame(self)

    def __str__(self) -> str:
        return text.comparison_summary(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.report())}</pre>"


def _pictures(result: TuningResult) -> Iterator[str]:
    """The plots that have something to show, as HTML images."""
    yield _image(result.plot_workers(), "Samples per second over workers")
    if result.stages:
        yield _image(result.plot_stages(), "Time of a sample in a worker, by stage")


def _image(figure: Figure, what: str) -> str:
    data = base64.b64encode(plots.svg_bytes(figure)).decode("ascii")
    return f'<p><img alt="{what}" src="data:image/svg+xml;base64,{data}"></p>'
