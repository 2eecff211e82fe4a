"""Pictures, by what is drawn in them."""

import io
import itertools
import sys
from dataclasses import replace
from functools import partial
from statistics import fmean

import matplotlib
import matplotlib.style
import pytest
from report.example import BEST, DEEP, NONE, STAGES, exactly, ran

from autotune_loader.diagnosis import Bottleneck
from autotune_loader.report.plots import MOST_STAGES, svg_bytes
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig

EMPTY = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())


approx = partial(pytest.approx, rel=0.1)


def points(axes, label):
    """What is drawn under a name of the legend."""
    named = [each[0] for each in axes.containers if each.get_label() == label]
    lines = named or [line for line in axes.lines if line.get_label() == label]
    return [tuple(point) for line in lines for point in line.get_xydata().tolist()]


DRAWN = (TuningResult.plot_workers, TuningResult.plot_stages, TuningResult.plot_timeline)


@pytest.mark.parametrize("draw", DRAWN)
def test_a_picture_leaves_style_and_pyplot_alone(draw, result):
    before = dict(matplotlib.rcParams)
    figure = draw(result)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert svg_bytes(figure).startswith(b"<?xml")
    # Nothing of its legend is cut.
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    # Where nothing was tried, or nothing worked, it says why it is empty.
    for bare in (EMPTY, replace(EMPTY, trials=result.trials[-2:])):
        assert draw is TuningResult.plot_timeline or draw(bare).axes[0].texts
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


MINE = (["dark_background", {"text.usetex": True}], "dark_background")


@pytest.mark.parametrize(
    ("draw", "mine"), [(DRAWN[0], MINE[0]), (DRAWN[1], MINE[1]), (DRAWN[2], MINE[1])]
)
def test_a_picture_is_the_same_whatever_is_set(draw, mine, result):
    usual = svg_bytes(draw(result))
    with matplotlib.style.context(mine):
        figure = draw(result)
        assert svg_bytes(figure) == usual
        figure.savefig(file := io.BytesIO(), format="rgba", dpi=20)
    assert set(file.getvalue()[:4]) == {255}  # the corner is white


def test_workers_shows_rounds_and_the_choice(result):
    faster = ran(replace(BEST, prefetch_factor=8), 1e4, in_round=0)
    result = replace(result, trials=(*result.trials, faster))
    axes = result.plot_workers().axes[0]
    rates = {config: list(result.rates_of(config).values()) for config in (BEST, DEEP, NONE)}
    mean = {each.num_workers: pytest.approx(fmean(its)) for each, its in rates.items()}
    # GIVEN 0, 1, 4 and 8 workers in the search; 0, 5, 5 with deeper queues and 8 in the rounds
    in_rounds = [(5, 1e4), *((count, mean[count]) for count in (5, 8, 0))]
    assert points(axes, "A/B rounds, 95% CI") == in_rounds
    assert [count for count, _ in points(axes, "single trial")] == [4, 1]
    assert points(axes, "chosen") == [(5, mean[5])]
    assert points(axes, "before tuning") == [(0, mean[0])]
    whiskers = [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "_"]
    assert whiskers[-2:] == [pytest.approx([its]) for its in (result.rate.low, result.rate.high)]
    # THEN no line leads where nothing ran
    solid = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line for line in solid if len(line.get_xdata()) > 1] == []
    # AND the choice is told with the numbers of the report
    assert axes.texts[0].get_position() == (5, 1.25 * 1e4)
    assert axes.get_ylim()[0] == 0
    rate, times = axes.texts[0].get_text().removeprefix("5 workers: ").split("\n")
    assert rate in result.summary[0]
    assert times.partition(" (")[0] in result.summary[1]


def test_the_band_is_what_the_model_expects(result):
    band = result.plot_workers().axes[0].collections[0].get_paths()[0].vertices
    expected = result.predict(BEST.num_workers).samples_per_s
    edges = [rate for workers, rate in band if workers == BEST.num_workers]
    assert [min(edges), max(edges)] == [approx(expected.low), approx(expected.high)]


@pytest.mark.parametrize(("best", "side"), [(4, "left"), (5, "right")])
def test_words_of_the_choice_stay_inside(best, side, result):
    axes = replace(result, best=LoaderConfig(num_workers=best)).plot_workers().axes[0]
    assert sum(axes.get_xlim()) == 8.0
    assert axes.texts[0].get_ha() == side


def test_ticks_are_whole_workers_and_plain_rates(result):
    axes = replace(result, best=NONE, trials=result.trials[:2]).plot_workers().axes[0]
    assert [tick for tick in axes.get_xticks() if tick % 1] == []
    text_of = axes.yaxis.get_major_formatter()
    assert [text_of(rate, 0) for rate in (1234.0, 0.5)] == ["1,234", "0.5"]


@pytest.mark.parametrize("far", [False, True])
def test_a_ceiling_is_a_line_unless_far(far, result):
    top = result.trials[2].samples_per_s
    ceilings = exactly(1.6 * top + far), exactly(0.9 * top)
    result = replace(result, ceiling=ceilings[0], transfer_ceiling=ceilings[1])
    axes = result.plot_workers().axes[0]
    drawn = {each.value for each in ceilings[far:]}
    assert {line.get_ydata()[0] for line in axes.lines if line.get_linestyle() in "--:"} == drawn


@pytest.mark.parametrize(("failing", "crosses"), [((7, 14, 15), [7, 14]), ((), [])])
def test_what_is_far_away_leaves_rates_room(result, failing, crosses):
    last = result.trials[-1]
    failed = [replace(last, config=LoaderConfig(num_workers=count)) for count in failing]
    far = {"ceiling": exactly(1e6), "transfer_ceiling": exactly(2e6)}
    figure = replace(result, trials=(*result.trials[:-2], *failed), **far).plot_workers()
    axes, legend = figure.axes[0], [text.get_text() for text in figure.legends[0].get_texts()]
    label = f"failed: {', '.join(map(str, failing))} workers"
    assert (label in legend) == bool(failing)
    height = pytest.approx(0.03 * result.trials[2].samples_per_s)
    assert points(axes, label) == [(count, height) for count in crosses]
    assert axes.get_xlim()[1] < 2 * 8
    assert axes.get_ylim()[1] < 2 * result.rate.value
    for rate in (1, 2):
        assert f"{rate}.00M samples/s, far above" in "\n".join(legend)


def test_stages_are_drawn_longest_first(result):
    axes = replace(result, bottleneck=Bottleneck.STORAGE()).plot_stages().axes[0]
    named = [tick.get_text().partition("\n") for tick in axes.get_yticklabels()]  # from the bottom
    assert [each[::2] for each in named] == [(each.stage, each.where) for each in STAGES[::-1]]
    shown = [text.get_text() for text in axes.texts]
    assert shown == [" 10%, 0.2 ms", " 30%, 0.6 ms", " 60%, 1.2 ms"]
    # AND by CPU time where that limits training
    by_cpu = result.plot_stages().axes[0]
    told = [text.get_text() for text in by_cpu.texts]
    assert told == [" 10% of CPU, 0.6 ms", " 15% of CPU, 0.2 ms", " 75% of CPU, 1.2 ms"]
    # Stages of one name are not drawn over each other, and long ones leave room for the bars.
    long = replace(STAGES[0], stage="Random" * 20, where="transforms" * 20)
    axes = replace(result, stages=(long, *STAGES * MOST_STAGES)).plot_stages().axes[0]
    axes.figure.canvas.draw()
    assert len({bar.get_y() for bar in axes.patches}) == len(axes.texts) == MOST_STAGES
    heights = [replace(result, stages=STAGES[:n]).plot_stages().get_figheight() for n in (1, 3)]
    assert [*heights, axes.figure.get_figheight()] == pytest.approx([2.86, 2.86, 5.8])
    assert axes.get_position().width > 0.5


def bars_of(axes, rows):
    """Begin and end of each bar, by its row and by what it shows."""
    bars = {}
    for container in axes.containers:
        for bar in container.patches:
            row = rows[round(bar.get_y() + bar.get_height() / 2)]
            for key in (row, container.get_label()):
                span = bar.get_x(), bar.get_x() + bar.get_width()
                bars.setdefault(key, []).append(span)
    return bars


@pytest.mark.parametrize(("trial", "number"), [(None, 10), (0, 0), (3, 3)])
def test_timeline_shows_the_last_ten_batches(trial, number, result):
    # GIVEN the last trial of the choice; no workers; eight with deep queues
    burst, axes = result.trials[number], result.plot_timeline(trial=trial).axes[0]
    rows = [tick.get_text() for tick in axes.get_yticklabels()]
    shown = [each.worker for each in burst.measurement.traces[-10:]]
    makers = {f"worker {each}" for each in shown if burst.config.num_workers}
    assert rows == sorted({"training loop", *makers})
    bars = bars_of(axes, rows)
    steps_s = [end - begin for begin, end in bars["training step"][-10:]]
    assert steps_s == pytest.approx([each.step_s for each in burst.measurement.traces[-10:]])
    # THEN what a worker does never overlaps, and a batch has its number in its step
    for row in makers:
        pairs = itertools.pairwise(sorted(bars[row]))
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairs)
    for text in axes.texts:
        at, row = text.get_position()
        kind = "training step" if text.get_color() == "white" else rows[row]
        centres = [pytest.approx((begin + end) / 2) for begin, end in bars[kind]]
        assert at in centres
        assert kind == rows[row] or centres[-10:].index(at) == int(text.get_text()) - 1
    assert {text.get_text() for text in axes.texts} == set(map(str, range(1, 11)))
    assert axes.get_title(loc="left") == f"The last 10 batches of a trial: {burst.config}"
    # AND there is room for each row
    assert axes.figure.get_size_inches() == pytest.approx([9.0, 1.8 + 0.36 * len(rows)])
    assert axes.get_ylim() == (len(rows) - 0.5, -0.5)


def test_a_thread_that_pins_has_a_row(result):
    last = result.trials[10]
    traces = [
        each._replace(pin_start=each.collate_end, pin_end=each.collate_end + 1e-4)
        for each in last.measurement.traces
    ]
    pinned = replace(last, measurement=replace(last.measurement, traces=tuple(traces)))
    axes = replace(result, trials=(pinned,)).plot_timeline().axes[0]
    rows = [tick.get_text() for tick in axes.get_yticklabels()]
    assert rows[:2] == ["training loop", "pinning thread"]
    bars = bars_of(axes, rows)
    start = min(each.fetch_start for each in traces[-10:])
    pinned_until = sorted(each.pin_end - start for each in traces[-10:])
    ends = sorted(end for _, end in bars["batch is pinned"][-10:])
    assert ends == pytest.approx(pinned_until)


def test_without_the_choice_a_timeline_is_the_last(result):
    axes = replace(result, best=LoaderConfig(num_workers=9)).plot_timeline().axes[0]
    last = [trial.config for trial in result.trials if trial.measurement][-1]
    assert axes.get_title(loc="left").endswith(f"of a trial: {last}")


def test_where_there_is_no_timeline_it_says_why(result):
    with pytest.raises(ValueError, match=r"trial=14 has no single batches\. Try one of 0, 1"):
        result.plot_timeline(trial=14)
    with pytest.raises(ValueError, match=r"which loader\.json does not have"):
        TuningResult.from_dict(result.to_dict()).plot_timeline()
