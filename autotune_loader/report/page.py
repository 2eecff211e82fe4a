"""The result as one HTML page that needs nothing else, and as a notebook's cell: pictures and data are inside."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from autotune_loader.report import plots
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.tables import render_findings, render_trials
from autotune_loader.report.units import bytes_text, counted
from autotune_loader.results.result import TuningResult
from autotune_loader.values.errors import MissingExtraError
from autotune_loader.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each with its caption, in the order of a reader's questions.
_PICTURES: dict[Callable[[TuningResult], Figure], str] = {
    plots.plot_workers: "Where the line stops rising, more workers do not help.",
    plots.plot_speedup: "Both configurations were timed in each round, so what slowed the machine slowed both.",
    plots.plot_stages: "What takes the longest is worth making cheaper first.",
    plots.plot_timeline: "A wait of the training loop is explained by the worker whose batch was not ready yet.",
    plots.plot_heatmap: "Each cell is the fastest of that pair; hatched cells are predictions.",
    plots.plot_history: "The line is the best rate after each trial.",
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
        pictures=_pictures(result, _PICTURES),
        configuration=json.dumps(needed, indent=2),
    )


def render_cell(result: TuningResult) -> str:
    """The notebook's view of a result: what was found, the table and, with matplotlib, pictures of workers and stages."""
    try:
        pictures = _pictures(result, (plots.plot_workers, plots.plot_stages))
    except MissingExtraError:
        pictures = []
    table = render_trials(result, width=120)
    return _rendered(is_cell=True, findings="\n".join(result.summary), table=table, pictures=pictures)


def _rendered(**values: Any) -> str:
    from importlib.resources import files

    from jinja2 import Environment

    template = files("autotune_loader.report").joinpath("page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(template).render(**values)


def _pictures(result: TuningResult, drawn: Iterable[Callable[[TuningResult], Figure]]) -> list[dict[str, str]]:
    return [
        {
            "name": draw.__name__.removeprefix("plot_"),
            "caption": _PICTURES[draw],
            "data": base64.b64encode(svg_bytes(draw(result))).decode("ascii"),
        }
        for draw in drawn
        if _has_something_to_show(draw, result)
    ]


def _has_something_to_show(draw: Callable[[TuningResult], Figure], result: TuningResult) -> bool:
    if draw is plots.plot_timeline:
        bursts = [result.finals.measurement_of(result.best), *(trial.measurement for trial in result.trials)]
        return any(burst is not None and burst.traces for burst in bursts)
    if draw is plots.plot_stages:
        return bool(result.stage_times)
    return draw is not plots.plot_speedup or (bool(result.finals.rounds) and result.best != result.baseline)


def _where_and_when(result: TuningResult) -> str:
    """Dataset and machine of the result, and the day of the page."""
    machine, told = (
        result.fingerprint,
        [f"Written on {datetime.now(timezone.utc).date()} by autotune_loader {__version__}"],
    )
    if machine is not None:
        told += [f"dataset {machine.dataset}"] if machine.dataset else []
        gpus = ", ".join(machine.gpus) or "no GPU"
        told.append(f"{counted(machine.usable_cores, 'core')}, {bytes_text(machine.memory_bytes)}, {gpus}")
        told += [f"torch {machine.torch}, {machine.platform or ''}".rstrip(", ")] if machine.torch else []
    return "; ".join(told) + "."
