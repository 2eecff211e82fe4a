"""One burst, batch by batch: what each worker did while the training loop stepped or waited.

training   waits ▒▒▒ steps ██ steps ██ waits ▒ steps ██
worker 0   fetch ████████ collate ▓ fetch ███████ ...
worker 1   fetch ██████ collate ▓ ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from autotune_loader.diagnosis.units import counted, share_text
from autotune_loader.report.plots import canvas
from autotune_loader.results.result import TuningResult
from autotune_loader.values import MAIN_PROCESS, BatchTrace, LoaderConfig, Measurement

MAX_BATCHES = 10
"""Batches shown, the last of the burst."""
LEAST_NUMBERED = 0.016
"""A bar that takes less of the width has no room for its batch's number."""
PALE = 0.35
"""Bars of earlier batches."""
_COLOURS = {  # with the legend's words; in the order of drawing
    "wait": (canvas.ORANGE, "training loop waits"),
    "step": (canvas.BLUE, "training step"),
    "fetch": (canvas.PURPLE, "samples are fetched"),
    "collate": (canvas.SKY, "batch is collated"),
    "unseen": ("#E5E5E5", "not seen"),
}


def plot_timeline(result: TuningResult, trial: int | None = None) -> canvas.Figure:
    """What each process did for the last batches of one burst; gaps between a worker's bars are idle time.

    Bars of one batch have its number where there is room; those of earlier batches are pale. Workers that made none of the
    batches are left out.

    Args:
        result: as `tune()` returned it; traces are not saved.
        trial: number of the trial; the best configuration's if None.

    Raises:
        ValueError: there is no such trial, it failed, or the result was loaded: a file has no single batches.
    """
    config, measurement = _burst(result, trial)
    shown = measurement.traces[-MAX_BATCHES:]
    waited_s = sum(trace.wait_s for trace in shown)
    waits = share_text(waited_s / (waited_s + sum(trace.step_s for trace in shown)))
    title = f"The last {counted(len(shown), 'batch')} of a trial: {config}\nThe training loop waits {waits} of the time shown"
    reported = share_text((result.measurement_of(config) or measurement).wait_share)
    rows = {worker: row for row, worker in enumerate(sorted({MAIN_PROCESS, *(trace.worker for trace in shown)}))}
    return canvas.picture(
        title if waits == reported else f"{title} ({reported} over whole trials)",
        partial(_draw, measurement.traces, rows),
        width=9.0,
        height=1.8 + 0.36 * len(rows),
        legend_columns=5,
    )


def _draw(traces: Sequence[BatchTrace], rows: Mapping[int, int], axes: canvas.Axes) -> None:
    """A row for the loop and one for each worker. Without workers the loop fetches: those bars lie on its wait."""
    shown = traces[-MAX_BATCHES:]
    start, end = min(min(trace.fetch_start, trace.requested) for trace in shown), shown[-1].step_end
    for activity, (colour, label) in _COLOURS.items():
        is_numbered = activity in ("step", "fetch") or (activity == "wait" and len(rows) > 1)
        bars = [span for span in _spans(traces, activity) if span[1] in rows and start < span[3] and span[2] < end]
        for number, worker, begun, ended in bars:
            row, length, alpha = rows[worker], ended - begun, 1 if number > 0 else PALE
            height = 0.4 if worker == MAIN_PROCESS and activity in ("fetch", "collate") else 0.72
            place: dict[str, Any] = {"left": begun - start, "edgecolor": "white", "linewidth": 0.4}
            axes.barh(row, length, height, color=colour, alpha=alpha, **place)
            if is_numbered and number > 0 and length > LEAST_NUMBERED * (end - start):
                ink = "white" if activity == "step" else "black"
                axes.text(begun - start + length / 2, row, str(number), color=ink, ha="center", va="center", fontsize=7)
        if bars:
            axes.barh(0, 0, color=colour, label=label)
    names = ["training loop" if worker == MAIN_PROCESS else f"worker {worker}" for worker in rows]
    axes.set_yticks(list(rows.values()), names)
    axes.set(xlabel="seconds", xlim=(0, end - start), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)


def _spans(traces: Sequence[BatchTrace], activity: str) -> Iterator[tuple[int, int, float, float]]:
    """(number, process, begin, end) of everything of this kind that the traces tell; the first batch shown has number 1."""
    if activity == "unseen":
        yield 1, MAIN_PROCESS, min(trace.fetch_start for trace in traces), traces[0].requested
        last_seen = {trace.worker: trace.collate_end for trace in traces if trace.worker != MAIN_PROCESS}
        yield from ((1, worker, seen_until, traces[-1].step_end) for worker, seen_until in last_seen.items())
        return
    for number, trace in enumerate(traces, 1 - max(0, len(traces) - MAX_BATCHES)):
        spans = {
            "wait": (MAIN_PROCESS, trace.requested, trace.received),
            "step": (MAIN_PROCESS, trace.received, trace.step_end),
            "fetch": (trace.worker, trace.fetch_start, trace.fetch_end),
            "collate": (trace.worker, trace.fetch_end, trace.collate_end),
        }
        yield number, *spans[activity]


def _burst(result: TuningResult, number: int | None) -> tuple[LoaderConfig, Measurement]:
    """The trial asked for; if None, the chosen configuration's last burst, or else the fastest of those that have traces."""
    traced = {each.number: (each.config, each.measurement) for each in result.trials if each.measurement}
    traced = {number: burst for number, burst in traced.items() if burst[1].traces}
    if not traced:
        raise ValueError(
            "plot_timeline() needs the single batches of a trial, which loader.json does not have; the result that tune() "
            "returned, in the process that tuned, would work"
        )
    if number is not None and number not in traced:
        known = ", ".join(map(str, sorted(traced)))
        raise ValueError(f"trial={number!r} has no single batches; these have some: {known}")
    if number is not None:
        return traced[number]
    chosen = [burst for burst in traced.values() if burst[0].key() == result.best.key()]
    return chosen[-1] if chosen else max(traced.values(), key=lambda each: each[1].samples_per_s.value)
