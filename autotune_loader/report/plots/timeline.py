"""One burst, batch by batch: what each worker did while the training loop stepped or waited.

training   waits ▒▒▒ steps ██ steps ██ waits ▒ steps ██
worker 0   fetch ████████ collate ▓ fetch ███████ ...
worker 1   fetch ██████ collate ▓ ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import measurement_of
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace, after_first_of_each

MAX_BATCHES = 36
"""Batches shown, the last of the burst: more cannot be told apart, and the first ones only show the start-up."""
_COLOURS = {  # with the legend's words; in the order of drawing
    "wait": (canvas.VERMILLION, "training loop waits"),
    "step": (canvas.BLUE, "training step"),
    "fetch": (canvas.GREEN, "samples are fetched"),
    "collate": (canvas.SKY, "batch is collated"),
    "unseen": ("#E5E5E5", "not seen"),
}


def plot_timeline(result: TuningResult, trial: int | None = None) -> canvas.Figure:
    """What each process did over the last batches of one burst; gaps between a worker's bars are idle time.

    Args:
        result: as `tune()` returned it; traces are not saved.
        trial: number of the trial; the best configuration's if None.

    Raises:
        ValueError: there is no such trial, or it failed.
        TunerError: no trace is there any more; they are not saved in `loader.json`.
    """
    config, measurement = _burst(result, trial)
    waits = f"The training loop waits {share_text(measurement.wait_share)} of the time"
    workers = sorted({trace.worker for trace in measurement.traces} - {MAIN_PROCESS})
    return canvas.picture(
        f"The last batches of a burst: {config}\n{waits}",
        partial(_draw, measurement.traces, workers),
        width=9.0,
        height=1.8 + 0.36 * (1 + len(workers)),
        legend_columns=4,
    )


def _draw(traces: Sequence[BatchTrace], workers: Sequence[int], axes: canvas.Axes) -> None:
    """A row for the loop and one for each worker. Without workers the loop fetches: those bars lie on its wait."""
    rows = {worker: row for row, worker in enumerate((MAIN_PROCESS, *workers))}
    start, end = _window(traces)
    shortest_s = 0.002 * (end - start)  # shorter waits are hand-overs, not stalls, and would only be a hairline
    shown = [
        (worker, activity, max(begun, start), min(ended, end))
        for worker, activity, begun, ended in _activities(traces)
        if ended > start and begun < end and ended > begun
    ]
    for activity, (colour, label) in _COLOURS.items():
        bars = [bar for bar in shown if bar[1] == activity and (activity != "wait" or bar[3] - bar[2] > shortest_s)]
        for worker, _, begun, ended in bars:
            height = 0.4 if worker == MAIN_PROCESS and activity in ("fetch", "collate") else 0.72
            look: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.4}
            axes.barh(rows[worker], ended - begun, height, left=begun - start, **look)
        if bars:
            axes.barh(0, 0, color=colour, label=label)
    axes.set_yticks(list(rows.values()), ["training loop", *(f"worker {worker}" for worker in workers)])
    axes.set(xlabel="seconds", xlim=(0, end - start), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)


def _window(traces: Sequence[BatchTrace]) -> tuple[float, float]:
    """From when to when everything that each process did is known.

    A burst ends with batches under way that were never delivered and left no trace: the picture ends before the first of
    them began, which is not before the end of any worker's last batch that was delivered. Where all that was
    delivered was made before the loop asked for any of it, the whole burst is shown, with the filling of its queues.
    """
    end = min([traces[-1].step_end, *_last_seen(traces).values()])
    later = [traces[position] for position in after_first_of_each(traces)] or traces  # the first show the start-up
    shown = [trace.requested for trace in later if trace.requested < end][-MAX_BATCHES:]
    if not shown:
        return min(trace.fetch_start for trace in traces), traces[-1].step_end
    return shown[0], end


def _last_seen(traces: Sequence[BatchTrace]) -> dict[int, float]:
    """When each worker ended its last batch that was delivered."""
    return {trace.worker: trace.collate_end for trace in traces if trace.worker != MAIN_PROCESS}


def _activities(traces: Sequence[BatchTrace]) -> Iterator[tuple[int, str, float, float]]:
    """(row, activity, begin, end) of everything that the traces tell."""
    for trace in traces:
        yield MAIN_PROCESS, "wait", trace.requested, trace.received
        yield MAIN_PROCESS, "step", trace.received, trace.step_end
        yield trace.worker, "fetch", trace.fetch_start, trace.fetch_end
        yield trace.worker, "collate", trace.fetch_end, trace.collate_end
    yield MAIN_PROCESS, "unseen", min(trace.fetch_start for trace in traces), traces[0].requested
    for worker, seen_until in _last_seen(traces).items():
        yield worker, "unseen", seen_until, traces[-1].step_end


def _burst(result: TuningResult, number: int | None) -> tuple[LoaderConfig, Measurement]:
    """The trial asked for; if None, the chosen configuration's burst, or else the fastest of those that have traces."""
    traced = {trial.number: trial for trial in result.trials if trial.measurement and trial.measurement.traces}
    chosen = measurement_of(result.best, result.finals, result.trials)
    if number is None and chosen is not None and chosen.traces:
        return result.best, chosen
    if not traced:
        raise TunerError(
            "no trace of a burst is there: they are kept in memory, not in loader.json. "
            "Call plot_timeline() on the result of tune(..., reuse=False), in the process that tuned"
        )
    if number is not None and number not in traced:
        known = ", ".join(map(str, sorted(traced)))
        raise ValueError(f"trial={number!r} has no trace; these have one: {known}")
    trial = max(traced.values(), key=lambda trial: trial.samples_per_s or 0.0) if number is None else traced[number]
    assert trial.measurement is not None
    return trial.config, trial.measurement
