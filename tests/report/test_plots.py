from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import matplotlib
import pytest
from autotune_loader.report.plots.training import plot_training
from autotune_loader.report.standings import final_ratios, standings
from autotune_loader.report.units import share_text
from matplotlib.axes import Axes
from report.example import STAGES

from autotune_loader.report import plots
from autotune_loader.report.plots import timeline
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.plots.stages import MOST_ROWS
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace

EMPTY = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
PICTURES = [getattr(plots, name) for name in plots.__all__]


def points(axes: Axes, label: str) -> list[tuple[float, float]]:
    """What is drawn under a name of the legend."""
    named = [each[0] for each in axes.containers if each.get_label() == label]
    lines = named or [line for line in axes.lines if line.get_label() == label]
    return [tuple(point) for line in lines for point in line.get_xydata().tolist()]


def bars(axes: Axes) -> list[tuple[str, str, float, float]]:
    """(row, activity, begin, end) in a timeline."""
    rows = [tick.get_text() for tick in axes.get_yticklabels()]
    legend = [each for each in axes.containers if each.patches[0].get_width() == 0]
    named = {each.patches[0].get_facecolor(): each.get_label() for each in legend}
    drawn = [bar for bar in axes.patches if bar.get_width() > 0]
    row_of = {bar: rows[round(bar.get_y() + bar.get_height() / 2)] for bar in drawn}
    return [(row_of[b], named[b.get_facecolor()], b.get_x(), b.get_x() + b.get_width()) for b in drawn]


@pytest.mark.parametrize("draw", PICTURES)
def test_every_picture_can_be_drawn_and_leaves_the_users_style_and_pyplot_alone(
    draw: Callable, result: TuningResult
) -> None:
    before = dict(matplotlib.rcParams)
    figure = draw(result)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert svg_bytes(figure).startswith(b"<?xml")
    # Where nothing was tried, or nothing worked, it has the failures, or it says why it is empty.
    failed = replace(EMPTY, trials=result.trials[-2:])
    for bare in () if draw is plots.plot_timeline else (EMPTY, failed):
        axes = draw(bare).axes[0]
        assert axes.lines or axes.patches or axes.texts
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_workers_shows_the_fastest_at_each_number_as_the_table_has_it_and_the_twins_curve(result: TuningResult) -> None:
    axes, rates = plots.plot_workers(result).axes[0], {}
    for row in standings(result):
        if row.rate is not None:
            rates.setdefault(row.config.num_workers, []).append(row.rate.value)
    assert points(axes, "measured, 95 % interval") == [(count, max(found)) for count, found in sorted(rates.items())]
    # The star of what ran in the rounds alone lies in the band of what is as fast.
    ((_, rate),) = points(axes, "chosen, in the paired rounds")
    assert axes.patches[0].get_y() < rate < axes.patches[0].get_y() + axes.patches[0].get_height()
    curve = points(axes, "predicted")
    assert [workers for workers, _ in curve] == list(range(max(rates) + 1))
    assert all(0 < rate <= 1.1 * result.ceiling.value for _, rate in curve)
    assert points(plots.plot_workers(replace(result, twin=None)).axes[0], "predicted") == []


def test_a_ceiling_far_above_is_told_instead_of_drawn(result: TuningResult) -> None:
    # GIVEN a step that takes no time
    far = Interval(value=1e6, low=1e6, high=1e6, count=9)
    figure = plots.plot_workers(replace(result, measured=replace(result.measured, ceiling_samples_per_s=far)))
    # THEN the rates are not pressed flat, and the legend has the number
    assert figure.axes[0].get_ylim()[1] < 2 * result.measured.samples_per_s.value
    assert any("1,000,000/s, far above" in text.get_text() for text in figure.legends[0].get_texts())


UNSURE = Interval(value=3.2, low=0.003, high=4004.0, count=2)


@pytest.mark.parametrize("speedup", [None, UNSURE])
def test_speedup_is_the_ratio_within_each_round_with_room_for_an_interval_that_tells(speedup, result) -> None:
    told = replace(result, measured=replace(result.measured, speedup=speedup or result.speedup))
    axes = plots.plot_speedup(told).axes[0]
    paired = [(number + 1, ratio) for number, ratio in final_ratios(result.finals, result.best, result.baseline)]
    assert points(axes, "chosen, a round") == paired
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.get_xlim() == (0.5, len(result.finals.rounds) + 0.5)
    if speedup is None:
        assert axes.get_ylim()[1] > result.speedup.high
        assert axes.patches
    else:  # of too few rounds: no band, and the points can still be seen
        assert axes.get_ylim()[1] < 50
        assert not axes.patches
        assert "chosen, mean 3.20x" in [line.get_label() for line in axes.lines]


def test_stages_are_drawn_longest_first_and_no_more_than_can_be_read(result: TuningResult) -> None:
    drawn = [tick.get_text() for tick in plots.plot_stages(result).axes[0].get_yticklabels()]
    assert drawn == ["Flip", "read", "decode"]  # from the bottom
    many = plots.plot_stages(replace(result, stage_times=STAGES * MOST_ROWS))
    assert len(many.axes[0].texts) == MOST_ROWS


@pytest.mark.parametrize("trial", [None, 0, 1])
def test_timeline_shows_the_end_of_one_burst_without_overlap_in_any_process(
    trial: int | None, result: TuningResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN the burst of the chosen configuration, which ran in the rounds alone; one without workers; one with them
    monkeypatch.setattr(timeline, "MAX_BATCHES", 3)
    shown = result.best if trial is None else result.trials[trial].config
    axes = plots.plot_timeline(result, trial=trial).axes[0]
    drawn, length_s, title = bars(axes), axes.get_xlim()[1], axes.get_title(loc="left")
    assert str(shown) in title
    assert trial is not None or f"waits {share_text(result.measured.wait_share)} of the time" in title
    assert {row for row, *_ in drawn} == {"training loop", *(f"worker {n}" for n in range(shown.num_workers))}
    # THEN what a process does never overlaps (but a loop without workers waits while it fetches); nothing leaves the picture
    for row in {row for row, *_ in drawn} - ({"training loop"} if trial == 0 else set()):
        spans = sorted((begin, end) for other, _, begin, end in drawn if other == row)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(begin >= 0 and end <= length_s + 1e-9 for *_, begin, end in drawn)
    # A queue so deep that all lay ready is shown from its filling on; else the last batches are.
    assert trial is None or 0 < sum(activity == "training step" for _, activity, *_ in drawn) <= 4


def test_timeline_says_where_nothing_of_a_worker_was_seen(result: TuningResult) -> None:
    # GIVEN a deep queue: whatever was delivered lay ready before the loop asked for any of it
    trial = next(each for each in result.trials if each.config.num_workers > 1)
    workers = {f"worker {number}" for number in range(trial.config.num_workers)}
    traces = trial.measurement.traces
    starts = [traces[0].requested - 1 + position / len(traces) for position in range(len(traces))]
    ready = tuple(
        trace._replace(fetch_start=start, fetch_end=start + 1e-3, collate_end=start + 1e-3)
        for trace, start in zip(traces, starts, strict=True)
    )
    queued = replace(trial, measurement=replace(trial.measurement, traces=ready))
    axes = plots.plot_timeline(replace(result, trials=(queued,)), trial=trial.number).axes[0]
    drawn, length_s = bars(axes), axes.get_xlim()[1]
    # THEN the queues are seen to fill, and no worker is shown as idle afterwards, nor the loop before
    assert {row for row, activity, *_ in drawn if activity == "samples are fetched"} == workers
    unseen = {row: (begin, end) for row, activity, begin, end in drawn if activity == "not seen"}
    assert unseen.pop("training loop") == pytest.approx((0.0, 1.0))
    assert set(unseen) == workers
    assert all(0.5 < start < end == pytest.approx(length_s) for start, end in unseen.values())


def test_where_there_is_no_timeline_it_says_why(result: TuningResult) -> None:
    failed = result.trials[-1].number
    with pytest.raises(ValueError, match=f"trial={failed} has no trace; these have one: 0, 1"):
        plots.plot_timeline(result, trial=failed)
    with pytest.raises(TunerError, match=r"not in loader\.json"):
        plots.plot_timeline(TuningResult.from_dict(result.to_dict()))


FIRST = BatchTrace(
    worker=0, samples=10, fetch_start=0.0, fetch_end=0.0, collate_end=0.0, cpu_s=0.0, requested=100.0, received=100.0,
    step_end=100.1,
)  # fmt: skip
BATCHES = [FIRST._replace(requested=100 + n * 0.1, step_end=100.1 + n * 0.1) for n in range(40)]
NONE, TWO, FOUR = LoaderConfig(), LoaderConfig(num_workers=2), LoaderConfig(num_workers=4)


@pytest.mark.parametrize(
    ("traces", "changes", "shown"),
    [
        # A pool that begins anew with the same configuration is no change.
        (BATCHES, [(0, TWO), (20, FOUR), (30, FOUR)], [(0.0, "2 x 2"), (2.0, "4 x 2")]),
        (BATCHES, [(0, NONE)], [(0.0, "0")]),
        (BATCHES[:5], [(-3, TWO), (9, FOUR)], []),  # what was forgotten, and what is yet to come
    ],
)
def test_rates_and_changes_of_a_training_are_drawn_where_they_were(traces, changes, shown) -> None:
    axes = plot_training(traces, changes).axes[0]
    rates = axes.patches[0].get_data().values.tolist()
    assert rates == pytest.approx([100.0] * len(rates), rel=0.21)
    assert [(pytest.approx(t.get_position()[0]), t.get_text().strip()) for t in axes.texts] == shown
    nothing = plot_training([], []).axes[0]
    assert [text.get_text() for text in nothing.texts] == ["No batch was trained yet."]
