from __future__ import annotations

from report.example import STAGES

from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig


def test_a_row_holds_the_configuration_and_what_was_measured_or_why_nothing_was(result: TuningResult) -> None:
    frame, trial = result.to_dataframe().set_index("number"), result.trials[1]
    assert list(frame.index) == [trial.number for trial in result.trials]
    row, measurement = frame.loc[trial.number], trial.measurement
    assert (row["num_workers"], row["prefetch_factor"]) == (trial.config.num_workers, trial.config.prefetch_factor)
    assert row["samples_per_s"] == measurement.samples_per_s.value
    assert row["samples_per_s_low"] == measurement.samples_per_s.low
    assert (row["wait_share"], row["rss_bytes"]) == (measurement.wait_share, measurement.memory.rss_bytes)
    # Beside 0 workers, which have none, prefetch factors stay whole numbers.
    assert str(frame["prefetch_factor"].dtype) == "Int64"
    failed = frame.iloc[-2]
    assert (failed["failure_kind"], failed["failure_phase"]) == ("shared_memory", "batches")
    assert "/dev/shm is full" in failed["failure_message"]
    assert failed[["samples_per_s", "wait_share"]].isna().all()


def test_a_row_of_the_other_frame_is_a_stage(result: TuningResult) -> None:
    frame = result.stages()
    assert list(frame.columns) == ["stage", "where", "wall_share", "cpu_share", "wall_s", "cpu_s"]
    assert list(frame.stage) == [each.stage for each in STAGES]
    assert list(frame.wall_s) == [each.wall_s for each in STAGES]


def test_without_a_row_columns_and_types_are_the_same(result: TuningResult) -> None:
    nothing = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    for empty, full in ((nothing.to_dataframe(), result.to_dataframe()), (nothing.stages(), result.stages())):
        assert len(empty) == 0
        assert list(empty.columns) == list(full.columns)
        numbers = [name for name, kind in full.dtypes.items() if kind.kind in "iufb"]
        assert (empty.dtypes[numbers] == full.dtypes[numbers]).all()
