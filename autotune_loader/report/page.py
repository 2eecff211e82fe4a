"""A result as an HTML page that needs nothing else, and as a notebook's cell: the text, and pictures inside of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from html import escape

from autotune_loader.report import plots
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.text import configurations_of, report_of, summary_of
from autotune_loader.results.result import TuningResult
from autotune_loader.values import MissingExtraError

_PAGE = """<!doctype html><meta charset="utf-8"><title>autotune_loader</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
pre {{ overflow-x: auto; font-size: 13px }} img {{ max-width: 100% }}</style>
<h1>DataLoader settings</h1><pre>{report}</pre>{pictures}
<h2>For the training script</h2><pre>{arguments}</pre>
"""


def page_of(result: TuningResult) -> str:
    """A self-contained page: the report, the pictures, the arguments for DataLoader.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    return _PAGE.format(
        report=escape(report_of(result, 110)),
        pictures="".join(_pictures(result)),
        arguments=escape(json.dumps(result.best.arguments(), indent=2)),
    )


def cell_of(result: TuningResult) -> str:
    """The notebook's view of a result: what to use, the table and, with matplotlib, the pictures."""
    try:
        pictures = "".join(_pictures(result))
    except MissingExtraError:
        pictures = ""
    return f"<pre>{escape(summary_of(result))}\n\n{escape(configurations_of(result))}</pre>{pictures}"


def _pictures(result: TuningResult) -> Iterator[str]:
    """Those that there is something to show in."""
    yield _image(plots.plot_workers(result), "Samples per second over workers")
    if result.stages:
        yield _image(plots.plot_stages(result), "Time of a sample in a worker, by stage")


def _image(figure: plots.Figure, what: str) -> str:
    data = base64.b64encode(svg_bytes(figure)).decode("ascii")
    return f'<p><img alt="{what}" src="data:image/svg+xml;base64,{data}"></p>'
