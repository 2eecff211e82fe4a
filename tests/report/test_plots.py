from __future__ import annotations

import builtins
import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from report.example import BASELINE, BEST

from autotune_loader.report import plots
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.plots.timeline import MAX_BATCHES
from autotune_loader.report.standings import final_ratios, standings
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError, TunerError
from autotune_loader.values.statistics import Interval
from tests.support import SimulatedMachine, simulated_result

CHOSEN = "chosen, in the paired rounds"
EMPTY = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
PICTURES = [getattr(plots, name) for name in plots.__all__]


def points(axes: Axes, label: str) -> list[tuple[float, float]]:
    """What is drawn under a name of the legend."""
    named = [each[0] for each in axes.containers if each.get_label() == label]
    lines = named or [line for line in axes.lines if line.get_label() == label]
    return [tuple(point) for line in lines for point in line.get_xydata().tolist()]


def bars(axes: Axes) -> list[tuple[str, str, float, float]]:
    """(row, activity, begin, end) in a timeline."""
    rows, found = [tick.get_text() for tick in axes.get_yticklabels()], []
    named = {
        each.patches[0].get_facecolor(): each.get_label()
        for each in axes.containers
        if each.patches[0].get_width() == 0
    }
    for bar in axes.patches:
        if bar.get_width() > 0:
            row, begin = rows[round(bar.get_y() + bar.get_height() / 2)], bar.get_x()
            found.append((row, named[bar.get_facecolor()], begin, begin + bar.get_width()))
    return found


def without_measurements(result: TuningResult) -> TuningResult:
    failed = tuple(trial for trial in result.trials if trial.failure)
    return replace(EMPTY, trials=failed)


@pytest.mark.parametrize("draw", PICTURES)
def test_every_picture_can_be_drawn_as_png_and_svg(draw: Callable, result: TuningResult) -> None:
    figure = draw(result)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert svg_bytes(figure).startswith(b"<?xml")
    # Where nothing was tried, or nothing worked, it has the failures, or it says why it is empty.
    for bare in () if draw is plots.plot_timeline else (EMPTY, without_measurements(result)):
        axes = draw(bare).axes[0]
        assert axes.lines or axes.patches or axes.texts


def test_drawing_leaves_the_users_style_and_pyplot_alone(result: TuningResult) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.plot_workers(result)
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, result: TuningResult) -> None:
    # GIVEN an installation without the extra
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    # THEN importing the module works, and drawing says what to install
    importlib.import_module("autotune_loader.report.plots")
    with pytest.raises(MissingExtraError, match=r"autotune-loader\[plots\]"):
        plots.plot_workers(result)


def test_workers_shows_the_fastest_at_each_number_of_workers_as_the_table_has_it(result: TuningResult) -> None:
    drawn = points(plots.plot_workers(result).axes[0], "measured, 95 % interval")
    rates = {}
    for row in standings(result):
        if row.rate is not None:
            rates.setdefault(row.config.num_workers, []).append(row.rate.value)
    assert drawn == [(w, max(r)) for w, r in sorted(rates.items())]


@pytest.fixture(scope="module")
def surprising() -> TuningResult:
    """A search that chose a configuration of which it had run no burst before the rounds."""
    for seed in range(20):
        found = simulated_result(
            SimulatedMachine(cores=4, wait_s=0.1, cpu_s=0.001, step_s=0.003, noise_sd=0.03), seed=seed
        )
        if all(trial.config.key() != found.best.key() for trial in found.trials):
            return found
    raise AssertionError("no search chose what it had not tried")


def test_what_ran_in_the_finals_alone_is_in_every_picture(surprising: TuningResult) -> None:
    # THEN the star lies in the band, and the timeline is of its own burst
    axes = plots.plot_workers(surprising).axes[0]
    ((_, rate),) = points(axes, CHOSEN)
    assert axes.patches[0].get_y() < rate < axes.patches[0].get_y() + axes.patches[0].get_height()
    title = plots.plot_timeline(surprising).axes[0].get_title(loc="left")
    assert str(surprising.best) in title
    assert f"waits {share_text(surprising.measured.wait_share)} of the time" in title


def test_the_axis_of_rounds_has_a_tick_for_each_and_room_for_the_whole_interval(surprising: TuningResult) -> None:
    paired = final_ratios(surprising.finals, surprising.best, surprising.baseline)[0][0]
    for finals in (surprising.finals, replace(surprising.finals, rounds=surprising.finals.rounds[paired : paired + 1])):
        told = replace(surprising, finals=finals)
        axes = plots.plot_speedup(told).axes[0]
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.get_xlim() == (0.5, len(finals.rounds) + 0.5)
        assert axes.get_ylim()[1] > told.speedup.high


def test_a_ceiling_far_above_is_told_instead_of_drawn(result: TuningResult) -> None:
    # GIVEN a step that takes no time
    far = Interval(value=1e6, low=1e6, high=1e6, count=9)
    figure = plots.plot_workers(replace(result, measured=replace(result.measured, ceiling_samples_per_s=far)))
    # THEN the rates are not pressed flat, and the legend has the number
    assert figure.axes[0].get_ylim()[1] < 2000
    assert any("1,000,000/s, far above" in text.get_text() for text in figure.legends[0].get_texts())


def test_speedup_is_the_ratio_within_each_round(result: TuningResult) -> None:
    first = result.finals.rounds[0]
    assert points(plots.plot_speedup(result).axes[0], "chosen, a round")[0] == (1, first[0] / first[-1])


def test_timeline_shows_the_best_trial_without_overlap_in_any_process(result: TuningResult) -> None:
    # GIVEN a burst of several workers
    axes = plots.plot_timeline(result).axes[0]
    drawn, length_s = bars(axes), axes.get_xlim()[1]
    assert str(BEST) in axes.get_title(loc="left")
    assert {row for row, *_ in drawn} == {"training loop", "worker 0", "worker 1", "worker 2", "worker 3"}
    # THEN what one process does never overlaps, and nothing leaves the picture
    for row in {row for row, *_ in drawn}:
        spans = sorted((begin, end) for other, _, begin, end in drawn if other == row)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[0][0] >= 0
        assert spans[-1][1] <= length_s + 1e-9
    assert sum(activity == "training step" for _, activity, *_ in drawn) <= MAX_BATCHES + 1


def test_timeline_says_where_nothing_of_a_worker_was_seen(result: TuningResult) -> None:
    # GIVEN a deep queue: whatever was delivered lay ready before the loop asked for any of it
    trial = next(trial for trial in result.trials if trial.config.num_workers == 2)
    traces = trial.measurement.traces
    starts = [traces[0].requested - 1 + position / len(traces) for position in range(len(traces))]
    ready = [
        trace._replace(fetch_start=start, fetch_end=start + 1e-3, collate_end=start + 1e-3)
        for trace, start in zip(traces, starts, strict=True)
    ]

    queued = replace(trial, measurement=replace(trial.measurement, traces=tuple(ready)))
    axes = plots.plot_timeline(replace(result, trials=(queued,)), trial=trial.number).axes[0]
    drawn, length_s = bars(axes), axes.get_xlim()[1]
    # THEN the queues are seen to fill, and no worker is shown as idle afterwards, nor the loop before
    assert {row for row, activity, *_ in drawn if activity == "samples are fetched"} == {"worker 0", "worker 1"}
    unseen = {row: (begin, end) for row, activity, begin, end in drawn if activity == "not seen"}
    assert unseen.pop("training loop") == pytest.approx((0.0, 1.0))
    assert set(unseen) == {"worker 0", "worker 1"}
    assert all(0.5 < start < end == pytest.approx(length_s) for start, end in unseen.values())
    assert axes.get_ylim() == (2.5, -0.5)


def test_timeline_without_workers_has_the_loop_alone(result: TuningResult) -> None:
    axes = plots.plot_timeline(result, trial=0).axes[0]
    assert str(BASELINE) in axes.get_title(loc="left")
    assert {row for row, *_ in bars(axes)} == {"training loop"}


def test_where_there_is_no_timeline_it_says_why(result: TuningResult) -> None:
    with pytest.raises(ValueError, match="trial=13 has no trace; these have one: 0, 1"):
        plots.plot_timeline(result, trial=13)
    with pytest.raises(TunerError, match=r"not in loader\.json"):
        plots.plot_timeline(TuningResult.from_dict(result.to_dict()))


def test_the_twins_curve_spans_every_number_of_workers(result: TuningResult) -> None:
    curve = points(plots.plot_workers(result).axes[0], "predicted")
    assert [workers for workers, _ in curve] == list(range(7))
    assert all(0 < rate <= 1.1 * 1450 for _, rate in curve)
    assert points(plots.plot_workers(replace(result, twin=None)).axes[0], "predicted") == []


def test_a_speed_up_of_too_few_rounds_has_no_band_and_its_points_can_be_seen(surprising: TuningResult) -> None:
    unsure = Interval(value=3.2, low=0.003, high=4004.0, count=2)
    axes = plots.plot_speedup(replace(surprising, measured=replace(surprising.measured, speedup=unsure))).axes[0]
    assert axes.get_ylim()[1] < 50
    assert not axes.patches
    assert "chosen, mean 3.20x" in [line.get_label() for line in axes.lines]
