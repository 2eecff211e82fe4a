"""The result as one HTML page that needs nothing else, and as a notebook's cell: pictures and data are inside."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autotune_loader.report import plots
from autotune_loader.report.machines import machine_words
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.tables import render_findings, render_trials
from autotune_loader.results.result import TuningResult
from autotune_loader.values.errors import MissingExtraError
from autotune_loader.version import __version__

# Pictures in the order of a reader's questions, each with its caption and with what has to be there to be drawn.
_PICTURES: dict[str, tuple[str, Callable[[TuningResult], object]]] = {
    "workers": ("Where the line stops rising, more workers do not help.", lambda result: True),
    "speedup": (
        "Both configurations were timed in each round, so what slowed the machine slowed both.",
        lambda result: result.finals.rounds and result.best != result.baseline,
    ),
    "stages": ("What takes the longest is worth making cheaper first.", lambda result: result.stage_times),
    "timeline": (
        "A wait of the training loop is explained by the worker whose batch was not ready yet.",
        lambda result: any(trial.measurement and trial.measurement.traces for trial in result.trials),
    ),
}


def render_html(result: TuningResult) -> str:
    """A self-contained page: what was found, the table, the pictures, the configuration as JSON.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    needed = {
        "dataloader_kwargs": result.best.to_kwargs(),
        "extras": result.best.to_extras(),
        "batch_size": result.batch_size.value,
        "status": result.status,
    }
    return _rendered(
        where=_where_and_when(result),
        doubt=result.summary[0] if result.status == "undecided" else "",
        findings=render_findings(result, width=10_000),
        table=render_trials(result, width=120),
        pictures=_pictures(result, *_PICTURES),
        configuration=json.dumps(needed, indent=2),
    )


def save_html(result: TuningResult, path: str) -> None:
    """Write the page."""
    Path(path).write_text(render_html(result), encoding="utf-8")


def render_cell(result: TuningResult) -> str:
    """The notebook's view of a result: what was found, the table and, with matplotlib, pictures of workers and stages."""
    try:
        pictures = _pictures(result, "workers", "stages")
    except MissingExtraError:
        pictures = []
    table = render_trials(result, width=120)
    return _rendered(is_cell=True, findings="\n".join(result.summary), table=table, pictures=pictures)


def _rendered(**values: Any) -> str:
    from importlib.resources import files

    from jinja2 import Environment

    template = files("autotune_loader.report").joinpath("page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(template).render(**values)


def _pictures(result: TuningResult, *names: str) -> list[dict[str, str]]:
    found = []
    for name in names:
        caption, is_there = _PICTURES[name]
        if is_there(result):
            svg = svg_bytes(getattr(plots, f"plot_{name}")(result))
            found.append({"name": name, "caption": caption, "data": base64.b64encode(svg).decode("ascii")})
    return found


def _where_and_when(result: TuningResult) -> str:
    """Dataset and machine of the result, and the day of the page."""
    machine = result.fingerprint
    told = [f"Written on {datetime.now(timezone.utc).date()} by autotune_loader {__version__}"]
    if machine is not None:
        told += [f"dataset {machine.dataset}"] if machine.dataset else []
        told.append(machine_words(machine))
    return "; ".join(told) + "."
