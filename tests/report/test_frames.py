"""Frames: a row for each trial or stage, with the same columns and types where there is none."""

from __future__ import annotations

import pytest
from report.example import STAGES

from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig


def test_a_row_holds_the_configuration_and_what_was_measured_or_why_nothing_was(result):
    frame, trial = result.to_dataframe().set_index("number"), result.trials[1]
    assert list(frame.index) == [trial.number for trial in result.trials]
    measured, names = trial.measurement, ["num_workers", "prefetch_factor", "samples_per_s", "samples_per_s_low"]
    rate = measured.samples_per_s
    assert frame.loc[1, names].tolist() == [1, trial.config.prefetch_factor, rate.value, rate.low]
    assert frame.loc[1, ["wait_share", "rss_bytes"]].tolist() == [measured.wait_share, measured.memory.rss_bytes]
    # Beside 0 workers, which have none, prefetch factors stay whole numbers; so do rounds beside the search's bursts.
    assert (str(frame["prefetch_factor"].dtype), str(frame["round"].dtype)) == ("Int64", "Int64")
    assert frame["round"].dropna().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    failed = frame.iloc[-2]
    assert (failed["failure_kind"], failed["failure_phase"]) == ("shared_memory", "batches")
    assert "/dev/shm is full" in failed["failure_message"]
    assert failed[["samples_per_s", "wait_share"]].isna().all()


def test_a_row_of_the_other_frame_is_a_stage(result):
    frame = result.to_dataframe("stages")
    assert list(frame.columns) == ["stage", "where", "wall_share", "cpu_share", "wall_s", "cpu_s"]
    assert list(zip(frame.stage, frame.wall_s, strict=True)) == [(each.stage, each.wall_s) for each in STAGES]


@pytest.mark.parametrize("of", ["trials", "stages"])
def test_without_a_row_columns_and_types_are_the_same(of, result):
    nothing = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    empty, full = nothing.to_dataframe(of), result.to_dataframe(of)
    assert len(empty) == 0
    assert empty.dtypes.equals(full.dtypes)
