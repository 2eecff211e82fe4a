"""The result as one HTML page that needs nothing else: pictures and data are inside, and nothing is loaded or run."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

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
    plots.plot_heatmap: "Each cell is the fastest of that pair; hatched ones were predicted and not worth a burst.",
    plots.plot_history: "The line shows what would have been found had the search stopped there.",
}
# One column that is read on a screen and on paper.
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 0.8rem; line-height: 1.35; }
pre.prose { white-space: pre-wrap; background: none; padding: 0; font: inherit; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: 0.9rem; }
"""


def render_html(result: TuningResult) -> str:
    """A self-contained page: what was found, the table, the pictures, the configuration as JSON.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    pictures = [
        _picture(draw, caption, result) for draw, caption in _PICTURES.items() if _has_something_to_show(draw, result)
    ]
    first = result.summary[:1] if result.status == "undecided" else ()
    body = [
        "<h1>DataLoader tuning report</h1>",
        f"<p>{html.escape(_where_and_when(result))}</p>",
        "".join(f"<p><strong>{html.escape(sentence)}</strong></p>" for sentence in first),
        f'<pre class="prose">{html.escape(render_findings(result, width=10_000))}</pre>',
        f"<h2>What was tried</h2><pre>{html.escape(render_trials(result, width=120))}</pre>",
        f"<h2>Pictures</h2>{''.join(pictures)}",
        f"<h2>Configuration</h2><pre>{html.escape(configuration_json(result))}</pre>",
    ]
    return _document("\n".join(body))


def render_cell(result: TuningResult) -> str:
    """What a notebook shows of a result: what was found, the table and, with matplotlib, pictures of workers and stages."""
    drawn = [plots.plot_workers, plots.plot_stages] if result.stage_times else [plots.plot_workers]
    try:
        picture = "".join(_picture(draw, _PICTURES[draw], result) for draw in drawn)
    except MissingExtraError:
        picture = ""
    found = html.escape("\n".join(result.summary))
    table = html.escape(render_trials(result, width=120))
    return f'<div><pre style="white-space: pre-wrap; font: inherit">{found}</pre><pre>{table}</pre>{picture}</div>'


def _where_and_when(result: TuningResult) -> str:
    """Dataset and machine that the result is of, and the day of the page."""
    machine = result.fingerprint
    told = [f"Written on {datetime.now(timezone.utc).date().isoformat()} by autotune_loader {__version__}"]
    if machine is not None:
        gpus = ", ".join(machine.gpus) or "no GPU"
        told.append(f"dataset {machine.dataset}" if machine.dataset else "")
        told.append(f"{counted(machine.usable_cores, 'core')}, {bytes_text(machine.memory_bytes)}, {gpus}")
        told.append(f"torch {machine.torch}, {machine.platform or ''}".rstrip(", ") if machine.torch else "")
    return "; ".join(each for each in told if each) + "."


def configuration_json(result: TuningResult) -> str:
    """What a training job needs of the result, as JSON: DataLoader arguments, extras, batch size."""
    needed = {
        "dataloader_kwargs": result.best.to_kwargs(),
        "extras": result.best.to_extras(),
        "batch_size": result.batch_size.value,
        "status": result.status,
    }
    return json.dumps(needed, indent=2)


def _document(body: str) -> str:
    # The policy makes sure of it: no script runs and nothing is fetched, whatever a message in the result says.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>DataLoader tuning report</title><style>{_STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _has_something_to_show(draw: Callable[[TuningResult], Figure], result: TuningResult) -> bool:
    if draw is plots.plot_timeline:
        chosen = result.finals.measurement_of(result.best)
        bursts = [chosen, *(trial.measurement for trial in result.trials)]
        return any(burst is not None and burst.traces for burst in bursts)
    if draw is plots.plot_stages:
        return bool(result.stage_times)
    if draw is plots.plot_speedup:
        return bool(result.finals.rounds) and result.best != result.baseline
    return True


def _picture(draw: Callable[[TuningResult], Figure], caption: str, result: TuningResult) -> str:
    data = base64.b64encode(svg_bytes(draw(result))).decode("ascii")
    alt = html.escape(f"{draw.__name__.removeprefix('plot_')}: {caption}", quote=True)
    return (
        f'<figure><img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>\n"
    )
