from __future__ import annotations

import builtins
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from report.example import BASELINE, BEST, synthetic_result

from autotune_loader.report import plots
from autotune_loader.report.plots.canvas import svg_bytes
from autotune_loader.report.plots.heatmap import heatmap_info
from autotune_loader.report.plots.history import history_info
from autotune_loader.report.plots.speedup import speedup_info
from autotune_loader.report.plots.timeline import MAX_BATCHES, timeline_info
from autotune_loader.report.plots.workers import workers_info
from autotune_loader.report.standings import final_ratios, standings
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError, TunerError
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import MAIN_PROCESS
from tests.support import SimulatedMachine, simulated_result

EMPTY = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
PICTURES = [getattr(plots, name) for name in plots.__all__]


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return synthetic_result()


def without_measurements(result: TuningResult) -> TuningResult:
    failed = tuple(trial for trial in result.trials if trial.failure)
    return replace(EMPTY, trials=failed)


@pytest.mark.parametrize("draw", PICTURES)
def test_every_picture_can_be_drawn_as_png_and_svg(draw: Callable, result: TuningResult) -> None:
    figure = draw(result)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert svg_bytes(figure).startswith(b"<?xml")


@pytest.mark.parametrize("draw", [picture for picture in PICTURES if picture is not plots.plot_timeline])
@pytest.mark.parametrize("make", [lambda _: EMPTY, without_measurements], ids=["no trial", "only failures"])
def test_what_is_missing_is_said_instead_of_drawn(draw: Callable, make: Callable, result: TuningResult) -> None:
    # GIVEN a run in which nothing worked
    figure = draw(make(result))
    # THEN the picture has marks (failures), or it says why it is empty
    axes = figure.axes[0]
    assert axes.lines or axes.patches or axes.texts
    assert figure._repr_png_()


def test_the_same_figure_gives_the_same_svg(result: TuningResult) -> None:
    assert svg_bytes(plots.plot_workers(result)) == svg_bytes(plots.plot_workers(result))


def test_figures_can_be_pickled(result: TuningResult) -> None:
    figure = pickle.loads(pickle.dumps(plots.plot_workers(result)))
    assert figure._repr_png_().startswith(b"\x89PNG")


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
    info = workers_info(result)
    rates = {}
    for row in standings(result):
        if row.rate is not None:
            rates.setdefault(row.config.num_workers, []).append(row.rate.value)
    assert [(workers, rate.value) for workers, rate in info.fastest] == [(w, max(r)) for w, r in sorted(rates.items())]


def test_workers_marks_the_chosen_one_with_its_rate_from_the_finals(result: TuningResult) -> None:
    workers, rate = workers_info(result).best
    assert (workers, rate.count) == (BEST.num_workers, len(result.finals.rounds))


def chosen_in_the_finals_alone() -> TuningResult:
    """A search that chose a configuration of which it had run no burst before the rounds, and knows the speed-up well."""
    for seed in range(20):
        found = simulated_result(
            SimulatedMachine(cores=4, wait_s=0.1, cpu_s=0.001, step_s=0.003, noise_sd=0.03), seed=seed
        )
        is_new = all(trial.config.key() != found.best.key() for trial in found.trials)
        if is_new and found.speedup is not None and found.speedup.is_telling:
            return found
    raise AssertionError("no search chose what it had not tried")


@pytest.fixture(scope="module")
def surprising() -> TuningResult:
    return chosen_in_the_finals_alone()


def test_what_ran_in_the_finals_alone_is_in_every_picture(surprising: TuningResult) -> None:
    # THEN the star lies in the band, the frame and the point are there, and the timeline is of its own burst
    info = workers_info(surprising)
    assert info.plateau[0] < info.best[1].value < info.plateau[1]
    assert [cell.samples_per_s for cell in heatmap_info(surprising).cells if cell.is_best] == [info.best[1].value]
    assert timeline_info(surprising).config == surprising.best
    assert timeline_info(surprising).wait_share == surprising.measured.wait_share


def test_the_axis_of_rounds_has_a_tick_for_each_and_room_for_the_whole_interval(surprising: TuningResult) -> None:
    paired = final_ratios(surprising.finals, surprising.best, surprising.baseline)[0][0]
    for finals in (surprising.finals, replace(surprising.finals, rounds=surprising.finals.rounds[paired : paired + 1])):
        told = replace(surprising, finals=finals)
        axes = plots.plot_speedup(told).axes[0]
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.get_xlim() == (0.5, len(finals.rounds) + 0.5)
        assert axes.get_ylim()[1] > told.speedup.high


def test_heatmap_tells_untried_from_failed_and_impossible(result: TuningResult) -> None:
    states = {(cell.workers, cell.prefetch_factor): cell.state for cell in heatmap_info(result).cells}
    assert states[4, 4] == "measured"
    assert states[8, 16] == "failed"
    assert states[1, 8] == "untried"
    assert states[0, 2] == "impossible"
    assert states[2, None] == "impossible"
    assert states[0, None] == "measured"


def test_a_ceiling_far_above_is_told_instead_of_drawn(result: TuningResult) -> None:
    # GIVEN a step that takes no time
    far = Interval(value=1e6, low=1e6, high=1e6, count=9)
    figure = plots.plot_workers(replace(result, measured=replace(result.measured, ceiling_samples_per_s=far)))
    # THEN the rates are not pressed flat, and the legend has the number
    assert figure.axes[0].get_ylim()[1] < 2000
    assert any("1,000,000/s, far above" in text.get_text() for text in figure.legends[0].get_texts())


def test_history_never_falls(result: TuningResult) -> None:
    info = history_info(result)
    rates = [rate for _, rate in info.best_so_far]
    assert rates == sorted(rates)
    assert rates[-1] == max(trial.samples_per_s or 0 for trial in result.trials)
    assert info.failed == (13, 14)


def test_speedup_is_the_ratio_within_each_round(result: TuningResult) -> None:
    info = speedup_info(result)
    first = result.finals.rounds[0]
    assert info.ratios[0] == (1, first[0] / first[-1])


def test_timeline_shows_the_best_trial_without_overlap_in_any_process(result: TuningResult) -> None:
    # GIVEN a burst of several workers
    info = timeline_info(result)
    assert info.config == BEST
    assert info.workers == (0, 1, 2, 3)
    # THEN what one process does never overlaps, and nothing leaves the picture
    for row in (MAIN_PROCESS, *info.workers):
        bars = sorted((bar.start_s, bar.end_s) for bar in info.bars if bar.row == row)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(bars))
        assert bars[0][0] >= 0
        assert bars[-1][1] <= info.length_s + 1e-9
    assert sum(bar.activity == "step" for bar in info.bars) <= MAX_BATCHES + 1


def test_timeline_says_where_nothing_of_a_worker_was_seen(result: TuningResult) -> None:
    # GIVEN a deep queue: whatever was delivered lay ready before the loop asked for any of it
    trial = next(trial for trial in result.trials if trial.config.num_workers == 2)
    traces = trial.measurement.traces
    starts = [traces[0].requested - 1 + position / len(traces) for position in range(len(traces))]
    ready = [
        replace(trace, fetch_start=start, fetch_end=start + 1e-3, collate_end=start + 1e-3)
        for trace, start in zip(traces, starts, strict=True)
    ]

    queued = replace(trial, measurement=replace(trial.measurement, traces=tuple(ready)))
    info = timeline_info(replace(result, trials=(queued,)), trial=trial.number)
    # THEN the queues are seen to fill, and no worker is shown as idle afterwards, nor the loop before
    assert {bar.row for bar in info.bars if bar.activity == "fetch"} == set(info.workers) == {0, 1}
    unseen = {bar.row: (bar.start_s, bar.end_s) for bar in info.bars if bar.activity == "unseen"}
    assert unseen.pop(MAIN_PROCESS) == pytest.approx((0.0, 1.0))
    assert set(unseen) == {0, 1}
    assert all(0.5 < start < end == pytest.approx(info.length_s) for start, end in unseen.values())
    axes = plots.plot_timeline(replace(result, trials=(queued,)), trial.number).axes[0]
    assert axes.get_ylim() == (2.5, -0.5)


def test_timeline_of_a_given_trial_and_without_workers(result: TuningResult) -> None:
    info = timeline_info(result, trial=0)
    assert (info.config, info.workers) == (BASELINE, ())
    assert {bar.activity for bar in info.bars} == {"wait", "step", "fetch", "collate"}


def test_timeline_of_a_trial_without_traces_names_those_that_have_some(result: TuningResult) -> None:
    with pytest.raises(ValueError, match="trial=13 has no trace; these have one: 0, 1"):
        timeline_info(result, trial=13)


def test_timeline_of_a_loaded_result_says_why_there_is_none(result: TuningResult) -> None:
    loaded = TuningResult.from_file(result.to_file())
    with pytest.raises(TunerError, match=r"not in loader\.json"):
        plots.plot_timeline(loaded)


def test_untried_cells_carry_the_twins_word() -> None:
    untried = [cell for cell in heatmap_info(synthetic_result()).cells if cell.state == "untried"]

    assert untried
    assert all(cell.predicted_samples_per_s and cell.predicted_samples_per_s > 0 for cell in untried)


def test_without_a_twin_untried_cells_say_nothing() -> None:
    blind = replace(synthetic_result(), twin=None)

    assert all(cell.predicted_samples_per_s is None for cell in heatmap_info(blind).cells)
    assert workers_info(blind).curve == ()


def test_the_twins_curve_spans_every_number_of_workers() -> None:
    info = workers_info(synthetic_result())

    assert [workers for workers, _ in info.curve] == list(range(7))
    assert all(0 < rate <= 1.1 * 1450 for _, rate in info.curve)


def test_a_speed_up_of_too_few_rounds_has_no_band_and_its_points_can_be_seen(surprising: TuningResult) -> None:
    unsure = Interval(value=3.2, low=0.003, high=4004.0, count=2)
    axes = plots.plot_speedup(replace(surprising, measured=replace(surprising.measured, speedup=unsure))).axes[0]
    assert axes.get_ylim()[1] < 50
    assert not axes.patches
    assert "mean 3.20x" in [line.get_label() for line in axes.lines]


def test_what_ran_in_one_round_only_has_its_cell(result: TuningResult) -> None:
    late = LoaderConfig(num_workers=5, prefetch_factor=8)
    rounds = tuple((*rates, None if number else 1234.0) for number, rates in enumerate(result.finals.rounds))
    finals = replace(result.finals, configs=(*result.finals.configs, late), rounds=rounds)
    cells = {(cell.workers, cell.prefetch_factor): cell for cell in heatmap_info(replace(result, finals=finals)).cells}
    assert (cells[5, 8].state, cells[5, 8].samples_per_s) == ("measured", 1234.0)


def test_the_band_is_called_what_it_is(result: TuningResult) -> None:
    labels = [patch.get_label() for patch in plots.plot_workers(result).axes[0].patches]
    assert "within 2 % of the chosen one" in labels
