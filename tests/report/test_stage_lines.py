"""Stages where people see them: frame, text, picture, file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report.example import STAGES

from autotune_loader.report.plots.stages import MOST_ROWS, plot_stages
from autotune_loader.results.result import TuningResult


def test_frame_report_picture_and_file_have_the_stages_longest_first(result: TuningResult, tmp_path: Path) -> None:
    frame = result.stages()
    assert list(frame.columns) == ["stage", "where", "wall_share", "cpu_share", "wall_s", "cpu_s"]
    assert list(frame.stage) == ["decode", "read", "Flip"]
    assert frame.wall_share.sum() == pytest.approx(1)
    lines = result.report().split("A sample's time in a worker:\n")[1].splitlines()
    assert lines[0] == "decode  60 % of the time,  75 % of the CPU  1.2 ms  photos.py:41, PIL.Image.convert"
    assert lines[1].startswith("read ")
    drawn = [tick.get_text() for tick in result.plot_stages().axes[0].get_yticklabels()]
    assert drawn == ["Flip", "read", "decode"]  # from the bottom
    assert len(plot_stages(replace(result, stage_times=STAGES * MOST_ROWS)).axes[0].texts) == MOST_ROWS
    result.save(tmp_path / "loader.json")
    assert TuningResult.load(tmp_path / "loader.json").stage_times == STAGES


def test_without_stages_the_frame_is_as_it_would_be_and_nothing_is_said(result: TuningResult) -> None:
    bare = replace(result, stage_times=())
    assert bare.stages().dtypes.to_dict() == result.stages().dtypes.to_dict()
    assert "A sample's time" not in bare.report()
    assert plot_stages(bare).axes[0].texts[0].get_text().startswith("No worker was watched")
