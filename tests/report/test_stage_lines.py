"""Stages where people see them: frame, text, picture, page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report.example import STAGES, synthetic_result

from autotune_loader.report.plots.stages import MOST_ROWS, plot_stages
from autotune_loader.results.result import TuningResult

COLUMNS = ["stage", "where", "wall_share", "cpu_share", "wall_s", "cpu_s"]


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return synthetic_result()


def test_the_frame_has_a_row_for_each_stage(result: TuningResult) -> None:
    frame = result.stages()
    assert list(frame.columns) == COLUMNS
    assert list(frame.stage) == ["decode", "read", "Flip"]
    assert frame.wall_share.sum() == pytest.approx(1)
    assert frame.cpu_share.sum() == pytest.approx(1)


def test_without_stages_the_frame_is_as_it_would_be_and_nothing_is_said(result: TuningResult) -> None:
    bare = replace(result, stage_times=())
    assert bare.stages().dtypes.to_dict() == result.stages().dtypes.to_dict()
    assert "A sample's time" not in bare.report()
    assert plot_stages(bare).axes[0].texts[0].get_text().startswith("No worker was watched")


def test_the_report_lists_the_longest_first(result: TuningResult) -> None:
    lines = result.report().split("A sample's time in a worker:\n")[1].splitlines()
    assert lines[0] == "decode  60 % of the time,  75 % of the CPU  1.2 ms  photos.py:41, PIL.Image.convert"
    assert lines[1].startswith("read ")


def test_the_picture_draws_the_longest_on_top(result: TuningResult) -> None:
    bars = result.plot_stages().axes[0]
    assert [tick.get_text() for tick in bars.get_yticklabels()] == ["Flip", "read", "decode"]
    many = replace(result, stage_times=STAGES * MOST_ROWS)
    assert len(plot_stages(many).axes[0].texts) == MOST_ROWS


def test_stages_are_in_the_file(result: TuningResult, tmp_path) -> None:
    result.save(tmp_path / "loader.json")
    assert TuningResult.load(tmp_path / "loader.json").stage_times == STAGES
