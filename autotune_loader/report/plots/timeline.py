"""One burst, batch by batch: what each worker did while the training loop stepped or waited.

training   waits ▒▒▒ steps ██ steps ██ waits ▒ steps ██
worker 0   fetch ████████ collate ▓ fetch ███████ ...
worker 1   fetch ██████ collate ▓ ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from autotune_loader.diagnosis.units import share_text
from autotune_loader.report.plots import canvas
from autotune_loader.results.result import TuningResult
from autotune_loader.values import MAIN_PROCESS, BatchTrace, LoaderConfig, Measurement, after_first_of_each

MAX_BATCHES = 36
"""Batches shown, the last of the burst: more cannot be told apart, and the first ones only show the start-up."""
HAIRLINE = 0.002
"""Waits below this share of the picture are hand-overs, not stalls, and would only be a hairline."""
_COLOURS = {  # with the legend's words; in the order of drawing
    "wait": (canvas.ORANGE, "training loop waits"),
    "step": (canvas.BLUE, "training step"),
    "fetch": (canvas.PURPLE, "samples are fetched"),
    "collate": (canvas.SKY, "batch is collated"),
    "unseen": ("#E5E5E5", "not seen"),
}


def plot_timeline(result: TuningResult, trial: int | None = None) -> canvas.Figure:
    """What each process did over the last batches of one burst; gaps between a worker's bars are idle time.

    Args:
        result: as `tune()` returned it; traces are not saved.
        trial: number of the trial; the best configuration's if None.

    Raises:
        ValueError: there is no such trial, it failed, or the result was loaded: a file has no single batches.
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
    """A row for the loop and one for each worker. Without workers the loop fetches: those bars lie on its wait.

    A burst ends with batches under way that were never delivered and left no trace: the picture ends before the first of
    them began, which is not before the end of any worker's last batch that was delivered. Where all that was
    delivered was made before the loop asked for any of it, the whole burst is shown, with the filling of its queues.
    """
    last_seen = {trace.worker: trace.collate_end for trace in traces if trace.worker != MAIN_PROCESS}
    start, end = min(trace.fetch_start for trace in traces), min([traces[-1].step_end, *last_seen.values()])
    later = after_first_of_each(traces) or traces  # the first show the start-up
    if shown := [trace.requested for trace in later if trace.requested < end][-MAX_BATCHES:]:
        start = shown[0]
    else:
        end = traces[-1].step_end
    rows = {worker: row for row, worker in enumerate((MAIN_PROCESS, *workers))}
    for activity, (colour, label) in _COLOURS.items():
        least_s = HAIRLINE * (end - start) if activity == "wait" else 0.0
        spans = [(w, max(begun, start), min(ended, end)) for w, begun, ended in _spans(traces, activity, last_seen)]
        bars = [(worker, begun, ended - begun) for worker, begun, ended in spans if ended - begun > least_s]
        for worker, begun, length in bars:
            height = 0.4 if worker == MAIN_PROCESS and activity in ("fetch", "collate") else 0.72
            axes.barh(rows[worker], length, height, left=begun - start, color=colour, edgecolor="white", linewidth=0.4)
        if bars:
            axes.barh(0, 0, color=colour, label=label)
    axes.set_yticks(list(rows.values()), ["training loop", *(f"worker {worker}" for worker in workers)])
    axes.set(xlabel="seconds", xlim=(0, end - start), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)


def _spans(
    traces: Sequence[BatchTrace], activity: str, last_seen: dict[int, float]
) -> Iterator[tuple[int, float, float]]:
    """(process, begin, end) of everything of this kind that the traces tell."""
    if activity == "unseen":
        yield MAIN_PROCESS, min(trace.fetch_start for trace in traces), traces[0].requested
        yield from ((worker, seen_until, traces[-1].step_end) for worker, seen_until in last_seen.items())
        return
    for trace in traces:
        spans = {
            "wait": (MAIN_PROCESS, trace.requested, trace.received),
            "step": (MAIN_PROCESS, trace.received, trace.step_end),
            "fetch": (trace.worker, trace.fetch_start, trace.fetch_end),
            "collate": (trace.worker, trace.fetch_end, trace.collate_end),
        }
        yield spans[activity]


def _burst(result: TuningResult, number: int | None) -> tuple[LoaderConfig, Measurement]:
    """The trial asked for; if None, the chosen configuration's last burst, or else the fastest of those that have traces."""
    traced = {each.number: (each.config, each.measurement) for each in result.trials if each.measurement}
    traced = {number: burst for number, burst in traced.items() if burst[1].traces}
    if not traced:
        raise ValueError(
            "plot_timeline() needs the single batches of a burst, which loader.json does not hold; the result that tune() "
            "returned, in the process that tuned, would work"
        )
    if number is not None and number not in traced:
        known = ", ".join(map(str, sorted(traced)))
        raise ValueError(f"trial={number!r} has no single batches; these have some: {known}")
    if number is not None:
        return traced[number]
    chosen = [burst for burst in traced.values() if burst[0].key() == result.best.key()]
    return chosen[-1] if chosen else max(traced.values(), key=lambda each: each[1].samples_per_s.value)
