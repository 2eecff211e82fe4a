from __future__ import annotations

import pytest
from report.example import STAGES

from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig


def test_a_row_holds_the_configuration_and_what_was_measured_or_why_nothing_was(result: TuningResult) -> None:
    frame, trial = result.to_dataframe().set_index("number"), result.trials[1]
    assert list(frame.index) == [trial.number for trial in result.trials]
    row, measurement = frame.loc[trial.number], trial.measurement
    assert measurement is not None
    assert measurement.memory is not None
    assert (row["num_workers"], row["prefetch_factor"]) == (trial.config.num_workers, trial.config.prefetch_factor)
    assert row["samples_per_s"] == measurement.samples_per_s.value
    assert row["samples_per_s_low"] == measurement.samples_per_s.low
    assert (row["wait_share"], row["rss_bytes"]) == (measurement.wait_share, measurement.memory.rss_bytes)
    # Beside 0 workers, which have none, prefetch factors stay whole numbers; so do rounds beside the search's bursts.
    assert (str(frame["prefetch_factor"].dtype), str(frame["round"].dtype)) == ("Int64", "Int64")
    assert frame["round"].dropna().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    failed = frame.iloc[-2]
    assert (failed["failure_kind"], failed["failure_phase"]) == ("shared_memory", "batches")
    assert "/dev/shm is full" in failed["failure_message"]
    assert failed[["samples_per_s", "wait_share"]].isna().all()


def test_a_row_of_the_other_frame_is_a_stage(result: TuningResult) -> None:
    frame = result.to_dataframe("stages")
    assert list(frame.columns) == ["stage", "where", "wall_share", "cpu_share", "wall_s", "cpu_s"]
    assert list(frame.stage) == [each.stage for each in STAGES]
    assert list(frame.wall_s) == [each.wall_s for each in STAGES]


@pytest.mark.parametrize("of", ["trials", "stages"])
def test_without_a_row_columns_and_types_are_the_same(of: str, result: TuningResult) -> None:
    nothing = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    empty, full = nothing.to_dataframe(of), result.to_dataframe(of)  # type: ignore[arg-type]
    assert len(empty) == 0
    assert empty.dtypes.equals(full.dtypes)
