"""Pictures of a result: rates over workers, the stages of a sample, and a timeline of single batches.

Figures are plain matplotlib figures, made without pyplot: nothing is kept in global state and no window opens. They
show themselves in a notebook, and `figure.savefig("picture.svg")` writes them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from autotune_loader.diagnosis import Bottleneck
from autotune_loader.report.perfetto import processes_of
from autotune_loader.report.ranking import Standing, ranking
from autotune_loader.report.text import tail_of
from autotune_loader.results.result import TuningResult
from autotune_loader.values import (
    MAIN_PROCESS,
    TORCH_PREFETCH_FACTOR,
    BatchTrace,
    MissingExtraError,
    StageTime,
    Trial,
    spans_of,
)
from autotune_loader.values.units import counted, rate_text, seconds_text, share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that colour-blind people tell apart (Okabe and Ito, "Color universal design", 2008).
BLACK, ORANGE, SKY, GREEN, BLUE = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILLION, PURPLE = "#D55E00", "#CC79A7"
PALE_GREY, GREY, DARK_GREY = "#E5E5E5", "#999999", "#555555"  # background and secondary text
# One look for all pictures, which neither reads nor changes the user's settings of matplotlib.
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE_GREY,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "autotune_loader",
}
FAR = 1.6
"""A ceiling this many times as high as the rates, or a failure as far to the right, would squeeze everything else."""
MOST_STAGES = 10
"""The bars of shorter stages are too thin to read."""
LONGEST_NAME = 36
"""Characters of a stage's name or place that fit beside its bar."""
BAND_POINTS = 32
"""Numbers of workers that the band of the model is computed for."""
MAX_BATCHES = 10
"""Batches in a timeline: the last of the trial."""
LEAST_NUMBERED = 0.016
"""A bar that takes less of the width has no room for the number of its batch."""
IN_WORKERS = ("fetch", "collate")
ACTIVITIES = {  # colour and legend, in the order of drawing
    "wait": (ORANGE, "training loop waits"),
    "step": (BLUE, "training step"),
    "fetch": (PURPLE, "samples are fetched"),
    "collate": (SKY, "batch is collated"),
    "pin": (GREEN, "batch is pinned"),
}


def plot_workers(result: TuningResult) -> Figure:
    """Rates over workers: a point for each setting that ran, the band that the model expects, failures and the ceilings."""
    rows = ranking(result)
    is_empty = not any(row.rate for row in rows)
    return _picture(
        "How many workers help", "No configuration worked." if is_empty else partial(_workers, result, rows)
    )


def _workers(result: TuningResult, rows: tuple[Standing, ...], axes: Axes) -> None:
    rated = [row for row in rows if row.rate is not None]
    top, counts = max(row.rate.value for row in rated if row.rate), {row.config.num_workers for row in rated}
    ceilings = (
        (result.ceiling, "never waiting for data", "--"),
        (result.transfer_ceiling, "most that workers transfer", ":"),
    )
    for ceiling, label, dash in ceilings:
        if ceiling is not None and ceiling.value > FAR * top:
            axes.plot([], [], " ", label=f"{label}: {rate_text(ceiling.value, result.rate_unit)}, far above")
        elif ceiling is not None:
            axes.axhline(ceiling.value, label=label, color=BLACK, linewidth=1.2, linestyle=dash)
    _band(axes, result, max(counts))
    for source, fill, label in (("rounds", BLUE, "A/B rounds, 95% CI"), ("search", "white", "single trial")):
        of_source = [row for row in rated if row.source == source]
        _draw_rates(axes, of_source, fmt="o", color=BLUE, markerfacecolor=fill, label=label)
    own, best = ([row for row in rated if row.config == each] for each in (result.baseline, result.best))
    _draw_rates(axes, own, fmt="s", color=BLACK, markersize=8, zorder=5, label="before tuning")
    label = "chosen" if result.status == "complete" else "so far"
    _draw_rates(axes, best, fmt="*", color=VERMILLION, markersize=15, zorder=5, label=label)
    if failed := sorted({row.config.num_workers for row in rows if row.rate is None} - counts):
        near = [count for count in failed if count <= FAR * (1 + max(counts))]
        label = f"failed: {', '.join(map(str, failed))} workers"
        axes.plot(near, [0.03 * top] * len(near), "x", color=VERMILLION, markersize=8, label=label)
    axes.set(xlabel="worker processes", ylabel=result.rate_unit.replace("/s", " per second"))
    axes.set_ylim(0, 1.25 * max(top, axes.dataLim.y1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == round(value) else f"{value:g}")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # type: ignore[call-arg, unused-ignore]
    for row in best:
        _annotate(axes, row, result)


def _band(axes: Axes, result: TuningResult, most: int) -> None:
    """The 95% interval of the rate that the model expects with the other settings as chosen."""
    counts = sorted({round(most * step / BAND_POINTS) for step in range(BAND_POINTS + 1)})
    try:
        expected = result.predictions([result.best.with_workers(count) for count in counts])
    except ValueError:  # nothing that it rests on was measured
        return
    low, high = zip(*((each.samples_per_s.low, each.samples_per_s.high) for each in expected), strict=True)
    label = f"model, prefetch {result.best.prefetch_factor or TORCH_PREFETCH_FACTOR}, 95%"
    axes.fill_between(counts, low, high, color=SKY, alpha=0.3, linewidth=0, label=label)


def _draw_rates(axes: Axes, rows: Sequence[Standing], **look: Any) -> None:
    """Rates, those of A/B rounds with their intervals, where these tell anything."""
    known = [(row, row.rate) for row in rows if row.rate is not None]
    if known:
        counts, rates = [row.config.num_workers for row, _ in known], [rate.value for _, rate in known]
        limits = [
            (max(0.0, rate.value - rate.low), rate.high - rate.value) if rate.is_telling else (0.0, 0.0)
            for _, rate in known
        ]
        axes.errorbar(counts, rates, [*zip(*limits, strict=True)], capsize=3, **look)


def _annotate(axes: Axes, row: Standing, result: TuningResult) -> None:
    """The rate and speedup of the chosen setting in words, above everything that is drawn."""
    if row.rate is None:
        return
    count = row.config.num_workers
    words = f"{counted(count, 'worker')}: {rate_text(row.rate.value, result.rate_unit)}"
    if result.speedup is not None:
        words += f"\n{result.speedup.as_gain()} {'than' if result.speedup.value >= 1 else 'as'} before"
    side, at = ("left", 0) if 2 * count <= sum(axes.get_xlim()) else ("right", 1)
    line = {"arrowstyle": "-", "color": VERMILLION, "linewidth": 0.8, "relpos": (at, 0)}
    look: dict[str, Any] = {"color": VERMILLION, "fontsize": 9, "ha": side, "va": "top", "arrowprops": line}
    axes.annotate(words, (count, row.rate.value), (count, axes.get_ylim()[1]), **look)


def plot_stages(result: TuningResult) -> Figure:
    """A bar for each stage of a sample: computing and waiting; on top the one with most of what limits training."""
    field = "cpu_share" if Bottleneck.CPU.said_by(result.bottleneck) else "wall_share"
    ordered = sorted(result.stages, key=attrgetter(field), reverse=True)
    shown = ordered[:MOST_STAGES][::-1]  # bars are drawn upwards
    content = partial(_stages, shown, field) if shown else "No trial with workers was recorded."
    return _picture("Where a sample's time goes in a worker", content, height=1.6 + 0.42 * max(3, len(shown)))


def _stages(stages: Sequence[StageTime], field: str, axes: Axes) -> None:
    rows = range(len(stages))
    computing = [min(each.cpu_s, each.wall_s) * 1e3 for each in stages]
    waiting = [each.waited_s * 1e3 for each in stages]
    axes.barh(rows, computing, color=BLUE, label="computing")
    if any(waiting):
        axes.barh(rows, waiting, left=computing, color=SKY, label="waiting (I/O, locks)")
    for row, each in enumerate(stages):
        share = f"{share_text(getattr(each, field))}{' of CPU' if field == 'cpu_share' else ''}"
        words = f" {share}, {seconds_text(each.wall_s)}"
        axes.text(each.wall_s * 1e3, row, words, va="center", fontsize=8, color=DARK_GREY)
    names = [f"{tail_of(each.stage, LONGEST_NAME)}\n{tail_of(each.where, LONGEST_NAME)}" for each in stages]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set(xlabel="self time per sample (ms)")
    axes.set_xlim(0, 1.3e3 * max(each.wall_s for each in stages))


def plot_timeline(result: TuningResult, trial: int | None = None) -> Figure:
    """A row for the training loop, for the thread that pins, and for each worker that made one of the last batches.

        training loop   waits ▒▒▒ steps ██ steps ██ waits ▒ steps ██
        worker 0        fetch ████████ collate ▓ fetch ███████ ...

    Fetches and steps have the number of their batch where there is room. Sending is not drawn, as it would lie over what a
    worker does next; nor are the batches that come after these, whose time is grey.
    """
    shown = _traced_trial(result, trial)
    traces = shown.measurement.traces if shown.measurement else ()
    rows = processes_of(traces[-MAX_BATCHES:])
    title = f"The last {counted(min(MAX_BATCHES, len(traces)), 'batch')} of a trial: {shown.config}"
    return _picture(title, partial(_timeline, traces, rows), width=9.0, height=1.8 + 0.36 * len(rows))


def _traced_trial(result: TuningResult, number: int | None) -> Trial:
    """The trial of this number; by default the last with the chosen setting, else the last that has single batches."""
    traced = {each.number: each for each in result.trials if each.measurement and each.measurement.traces}
    if not traced:
        raise ValueError(
            "plot_timeline() needs the single batches of a trial, which loader.json does not have. Try the result that "
            "tune() returned, in the process that tuned."
        )
    if number is None:
        return max(traced.values(), key=lambda each: (each.config.key() == result.best.key(), each.number))
    if number not in traced:
        raise ValueError(f"trial={number!r} has no single batches. Try one of {', '.join(map(str, sorted(traced)))}.")
    return traced[number]


def _timeline(traces: Sequence[BatchTrace], names: Mapping[int, str], axes: Axes) -> None:
    rows, last = {process: row for row, process in enumerate(names)}, traces[-MAX_BATCHES:]
    start, end = min(min(trace.fetch_start, trace.requested) for trace in last), last[-1].step_end
    spans = [each for trace in traces for each in spans_of(trace) if each.process in rows and each.end > start]
    for activity, (colour, label) in ACTIVITIES.items():
        if bars := [each for each in spans if each.activity == activity]:
            lengths, begins = [each.end - each.begin for each in bars], [each.begin - start for each in bars]
            # Without workers the loop fetches while it waits: narrower, on top of the wait.
            heights = [0.4 if activity in IN_WORKERS and each.process == MAIN_PROCESS else 0.72 for each in bars]
            look: dict[str, Any] = {"color": colour, "label": label, "edgecolor": "white", "linewidth": 0.4}
            axes.barh([rows[each.process] for each in bars], lengths, heights, begins, **look)
    done = {each.process: each.end for each in sorted(spans, key=lambda each: each.end) if each.activity != "send"}
    ends = {rows[process]: at - start for process, at in done.items() if process >= 0}
    if ends:  # what a worker makes next is not among the batches
        look = {"color": PALE_GREY, "label": "not seen"}
        axes.barh(list(ends), [end - start - at for at in ends.values()], 0.72, list(ends.values()), **look)
    for number, each in [(number, each) for number, trace in enumerate(last, 1) for each in spans_of(trace)]:
        if each.activity in ("fetch", "step") and each.end - each.begin > LEAST_NUMBERED * (end - start):
            middle, ink = (each.begin + each.end) / 2 - start, "white" if each.activity == "step" else "black"
            axes.text(middle, rows[each.process], str(number), color=ink, ha="center", va="center", fontsize=7)
    axes.set_yticks(list(rows.values()), list(names.values()))
    axes.set(xlabel="seconds", xlim=(0, end - start), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)


def _picture(title: str, content: Callable[[Axes], None] | str, *, width: float = 7.0, height: float = 4.2) -> Figure:
    """A figure with one set of axes, `width` times `height` inches; a string says why there is nothing to draw."""
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plotting", "matplotlib", "plots") from error
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        # IPython's inline backend does not know a figure made without pyplot.
        figure._repr_png_ = partial(_png_bytes, figure)  # type: ignore[attr-defined, unused-ignore]
        axes = figure.add_subplot()
        axes.set_title(title, wrap=True)
        if isinstance(content, str):
            axes.set_axis_off()
            axes.text(0.5, 0.5, content, ha="center", va="center", transform=axes.transAxes, color=GREY, wrap=True)
        else:
            content(axes)
            figure.legend(loc="outside lower center", ncols=3)
        figure.draw_without_rendering()  # makes the labels of ticks, which would follow the user's settings later
        # A dark style has a dark background for files.
        figure.savefig = partial(figure.savefig, facecolor=figure.get_facecolor())  # type: ignore[method-assign]
    return figure


def _png_bytes(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """The figure as an SVG file; the same figure gives the same bytes."""
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", STYLE]):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
