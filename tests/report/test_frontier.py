"""What fewer cores and less memory would do: points, which of them nothing beats, and the sentence about half the cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report.example import BEST, synthetic_result

from autotune_loader.report import frontier
from autotune_loader.report.frontier import Point, frontier_frame, frontier_points, frontier_sentence, on_frontier
from autotune_loader.report.plots.frontier import FrontierInfo, frontier_info, labelled, plot_frontier
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig

COLUMNS = [
    "num_workers",
    "prefetch_factor",
    "samples_per_s",
    "rate_share",
    "cores",
    "memory_bytes",
    "source",
    "on_frontier",
]


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return synthetic_result()


def point(rate: float, cores: float, memory: int | None = None, workers: int = 1) -> Point:
    config = LoaderConfig(num_workers=workers)
    return Point(config=config, samples_per_s=rate, cores=cores, memory_bytes=memory, is_measured=True)


def test_nothing_beats_what_is_on_the_frontier() -> None:
    few, many, dear, slow = point(50, 1, 100), point(100, 2, 200), point(99, 2.5, 200), point(50, 1.5, 300)
    assert on_frontier((few, many, dear, slow)) == (few, many)


def test_less_memory_is_worth_a_point_of_its_own_and_equals_stay_both() -> None:
    small, large = point(100, 2, 100), point(101, 2, 200)
    assert on_frontier((small, large)) == (small, large) or on_frontier((small, large)) == (small,)
    alike = (point(100, 2), point(100.1, 2.001))
    assert on_frontier(alike) == alike


def test_the_frame_has_what_was_measured_and_what_lies_between(result: TuningResult) -> None:
    frame = result.frontier()
    assert list(frame.columns) == COLUMNS
    assert set(frame.source) == {"measured", "predicted"}
    assert list(frame.cores) == sorted(frame.cores)
    chosen = frame[(frame.num_workers == 4) & (frame.prefetch_factor == 4) & (frame.source == "measured")]
    assert chosen.rate_share.iloc[0] == pytest.approx(1)
    assert frame.on_frontier.any()


def test_predicted_cores_are_those_that_a_batch_takes(result: TuningResult) -> None:
    # 60 ms of fetch and 22 ms of step on one thread, for each batch of 32
    for workers in (1, 2, 3):
        answer = result.predict(workers)
        assert answer.cores == pytest.approx(answer.samples_per_s.value / 32 * (0.060 + 0.022), rel=0.2)


def test_about_half_of_the_cores_are_told_in_a_sentence(result: TuningResult) -> None:
    def with_cores(config: LoaderConfig, share: float, rate: float) -> TuningResult:
        trials = [
            replace(
                trial,
                measurement=replace(
                    trial.measurement,
                    cpu_share=share if trial.config == config else 1.0,
                    samples_per_s=replace(trial.measurement.samples_per_s, value=rate)
                    if trial.config == config
                    else trial.measurement.samples_per_s,
                ),
            )
            for trial in result.trials
            if trial.measurement is not None
        ]
        return replace(result, trials=tuple(trials))

    two = LoaderConfig(num_workers=2, prefetch_factor=2, consumer_threads=1)
    told = frontier_sentence(with_cores(two, 0.5, 1250.0))
    assert told.startswith("Fewer cores: 9")
    assert "% of the rate with 2.0 instead of" in told
    assert "(2 workers, prefetch 2, 1 step thread)." in told
    assert frontier_sentence(with_cores(two, 0.5, 300.0)) == ""


def test_without_cpu_time_there_is_a_frame_and_nothing_is_drawn() -> None:
    bare = TuningResult(best=BEST, status="fallback", baseline=BEST)
    assert frontier_points(bare) == ()
    assert list(frontier_frame(bare).columns) == COLUMNS
    assert frontier_sentence(bare) == ""
    assert plot_frontier(bare).axes[0].texts[0].get_text() == "CPU time was not measured in any burst."


def test_the_picture_marks_the_chosen_one(result: TuningResult) -> None:
    info = frontier_info(result)
    assert info.chosen is not None
    assert info.chosen.config == BEST
    assert plot_frontier(result).axes[0].get_xlabel().startswith("cores kept busy")


def test_no_point_lies_on_the_edge_and_no_label_on_another(result: TuningResult) -> None:
    points = tuple(point(100 + each, 1.7 + each / 1000, workers=each) for each in range(6))
    info = FrontierInfo(points=points, unbeaten=points, chosen=points[3], ceiling=None)
    assert labelled(info) == [points[3]]
    axes = plot_frontier(result).axes[0]
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > 1.02 * max(each.cores for each in frontier_info(result).points)


def test_who_keeps_hardly_a_core_busy_is_told_nothing_of_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    best = replace(point(100, 0.2), config=BEST)
    bare = TuningResult(best=BEST, status="complete", baseline=BEST)
    monkeypatch.setattr(frontier, "frontier_points", lambda _: (point(90, 0.05, workers=0), best))
    assert frontier_sentence(bare) == ""
    monkeypatch.setattr(frontier, "frontier_points", lambda _: (point(90, 0.5, workers=0), replace(best, cores=2.0)))
    assert frontier_sentence(bare).startswith("Fewer cores: 90 % of the rate with 0.5 instead of 2.0 cores busy")


def test_a_point_that_is_alone_lies_within_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(point(3120, 1.9), config=BEST)
    monkeypatch.setattr("autotune_loader.report.plots.frontier.frontier_points", lambda _: (alone,))
    axes = plot_frontier(TuningResult(best=BEST, status="complete", baseline=BEST)).axes[0]
    assert axes.get_xlim() == (0, pytest.approx(1.08 * 1.9))
    assert axes.get_ylim() == (0, pytest.approx(1.1 * 3120))
