"""A result as an HTML page, and as a notebook shows it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from autotune_loader.report import plots, text
from autotune_loader.results.result import TuningResult
from autotune_loader.values import MissingExtraError

if TYPE_CHECKING:
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


def page_of(result: TuningResult) -> str:
    """An HTML page with the report and the pictures, which needs no other file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    return _PAGE.format(
        report=escape(text.report_of(result, _PAGE_WIDTH)),
        pictures="".join(_pictures(result)),
        arguments=escape(_code_of(result)),
    )


def _code_of(result: TuningResult) -> str:
    """What a script takes over: an AutoLoader's settings are not for DataLoader."""
    if result.found_by == "autoloader":
        return 'AutoLoader(dataset, ..., config="loader.json")'
    return json.dumps(result.best.to_kwargs(), indent=2)


def notebook_html(result: TuningResult) -> str:
    """What to use, the table and, with matplotlib, the pictures."""
    try:
        pictures = "".join(_pictures(result))
    except MissingExtraError:
        pictures = ""
    return f"<pre>{escape(str(result))}\n\n{escape(text.configurations_of(result))}</pre>{pictures}"


def _pictures(result: TuningResult) -> Iterator[str]:
    """The plots that have something to show, as HTML images."""
    yield _image(result.plot_workers(), "Samples per second over workers")
    if result.stages:
        yield _image(result.plot_stages(), "Time of a sample in a worker, by stage")


def _image(figure: Figure, what: str) -> str:
    data = base64.b64encode(plots.svg_bytes(figure)).decode("ascii")
    return f'<p><img alt="{what}" src="data:image/svg+xml;base64,{data}"></p>'
