"""Pictures, by what is drawn in them."""

import itertools
import sys
from dataclasses import replace

import matplotlib
import pytest
from report.example import BEST, DEEP, NONE, STAGES, exactly

from autotune_loader.report import plots
from autotune_loader.report.plots import timeline
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.plots.charts import MOST_ROWS
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig

EMPTY = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())


def points(axes, label):
    """What is drawn under a name of the legend."""
    named = [each[0] for each in axes.containers if each.get_label() == label]
    lines = named or [line for line in axes.lines if line.get_label() == label]
    return [tuple(point) for line in lines for point in line.get_xydata().tolist()]


def bars(axes):
    """(row, activity, begin, end) in a timeline."""
    rows = [tick.get_text() for tick in axes.get_yticklabels()]
    legend = [each for each in axes.containers if each.patches[0].get_width() == 0]
    named = {each.patches[0].get_facecolor(): each.get_label() for each in legend}
    drawn = [bar for bar in axes.patches if bar.get_width() > 0]
    row_of = {bar: rows[round(bar.get_y() + bar.get_height() / 2)] for bar in drawn}
    return [(row_of[b], named[b.get_facecolor()], b.get_x(), b.get_x() + b.get_width()) for b in drawn]


@pytest.mark.parametrize("draw", [plots.plot_workers, plots.plot_stages, plots.plot_timeline])
def test_every_picture_can_be_drawn_and_leaves_the_users_style_and_pyplot_alone(draw, result):
    before = dict(matplotlib.rcParams)
    figure = draw(result)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert svg_bytes(figure).startswith(b"<?xml")
    # Nothing of its legend is cut.
    figure.canvas.draw()
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    # Where nothing was tried, or nothing worked, it says why it is empty.
    for bare in (EMPTY, replace(EMPTY, trials=result.trials[-2:])):
        assert draw is plots.plot_timeline or draw(bare).axes[0].texts
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_workers_shows_what_ran_by_the_rounds_where_there_are_any_and_joins_only_neighbours(result):
    axes = plots.plot_workers(result).axes[0]
    rates = {config: list(result.rates_of(config).values()) for config in (BEST, DEEP, NONE)}
    mean = {config.num_workers: pytest.approx(sum(each) / len(each)) for config, each in rates.items()}
    # GIVEN 0, 1, 4 and 8 workers in the search; 0, 5 and 8 in the rounds, whose rates count
    assert points(axes, "timed in turns, 95%") == [(count, mean[count]) for count in (5, 8, 0)]
    assert [count for count, _ in points(axes, "timed once, 95%")] == [4, 1]
    assert points(axes, "chosen") == [(5, mean[5])]
    assert points(axes, "before tuning") == [(0, mean[0])]
    # THEN no line leads through counts that never ran
    joined = [line.get_xdata().tolist() for line in axes.lines if line.get_linestyle() == "-"]
    assert sorted(each for each in joined if len(each) == 2) == [[0, 1], [4, 5]]
    # AND what failed is shown where it failed, which no prediction reaches
    assert [count for count, _ in points(axes, "failed")] == [48, 64]
    assert [count for count, _ in points(axes, "predicted, prefetch 2")] == list(range(9))
    assert points(plots.plot_workers(replace(result, machine=None)).axes[0], "predicted, prefetch 2") == []
    # AND a ceiling far above is told instead of drawn, so that rates are not pressed flat
    figure = plots.plot_workers(replace(result, ceiling=exactly(1e6)))
    assert figure.axes[0].get_ylim()[1] < 2 * result.rate.value
    assert any("1.00M/s, far above" in text.get_text() for text in figure.legends[0].get_texts())


def test_stages_are_drawn_longest_first_and_no_more_than_can_be_read(result):
    drawn = [tick.get_text() for tick in plots.plot_stages(result).axes[0].get_yticklabels()]
    assert drawn == ["Flip", "read", "decode"]  # from the bottom
    assert len(plots.plot_stages(replace(result, stages=STAGES * MOST_ROWS)).axes[0].texts) == MOST_ROWS


@pytest.mark.parametrize("trial", [None, 0, 1], ids=["of the choice", "without workers", "with a worker"])
def test_timeline_shows_the_end_of_one_burst_without_overlap_in_any_process(trial, result, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_BATCHES", 3)
    shown = result.best if trial is None else result.trials[trial].config
    axes = plots.plot_timeline(result, trial=trial).axes[0]
    drawn, rows = bars(axes), {row for row, *_ in bars(axes)}
    assert str(shown) in axes.get_title(loc="left")
    assert rows == {"training loop", *(f"worker {number}" for number in range(shown.num_workers))}
    # THEN what a process does never overlaps (but a loop without workers waits while it fetches); nothing leaves the picture
    for row in rows - ({"training loop"} if trial == 0 else set()):
        spans = sorted((begin, end) for other, _, begin, end in drawn if other == row)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(begin >= 0 and end <= axes.get_xlim()[1] + 1e-9 for *_, begin, end in drawn)
    # A queue so deep that all lay ready is shown from its filling on; else the last batches are.
    assert trial is None or 0 < sum(activity == "training step" for _, activity, *_ in drawn) <= 4


def test_where_there_is_no_timeline_it_says_why(result):
    with pytest.raises(ValueError, match="trial=14 has no single batches; these have some: 0, 1"):
        plots.plot_timeline(result, trial=14)
    with pytest.raises(ValueError, match=r"which loader\.json does not hold"):
        plots.plot_timeline(TuningResult.from_dict(result.to_dict()))
