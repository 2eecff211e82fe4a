from __future__ import annotations

from report.example import BEST

from autotune_loader.report.frame import trials_frame
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig


def test_a_row_holds_the_configuration_and_what_was_measured(result: TuningResult) -> None:
    frame = trials_frame(result).set_index("number")
    trial = next(trial for trial in result.trials if trial.config == BEST)
    row, measurement = frame.loc[trial.number], trial.measurement
    assert measurement is not None
    assert measurement.memory is not None
    assert list(frame.index) == [trial.number for trial in result.trials]
    assert (row["num_workers"], row["prefetch_factor"], row["consumer_threads"]) == (4, 4, 1)
    assert row["samples_per_s"] == measurement.samples_per_s.value
    assert row["samples_per_s_low"] == measurement.samples_per_s.low
    assert row["wait_share"] == measurement.wait_share
    assert row["pss_bytes"] == measurement.memory.pss_bytes
    # Beside 0 workers, which have none, prefetch factors stay whole numbers.
    assert str(frame["prefetch_factor"].dtype) == "Int64"


def test_a_failed_trial_has_its_reason_and_no_rate(result: TuningResult) -> None:
    row = trials_frame(result).iloc[-2]
    assert (row["failure_kind"], row["failure_phase"]) == ("shared_memory", "batches")
    assert "/dev/shm is full" in row["failure_message"]
    assert row[["samples_per_s", "wait_share"]].isna().all()


def test_without_trials_columns_and_types_are_the_same(result: TuningResult) -> None:
    empty = trials_frame(TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig()))
    full = trials_frame(result)
    assert len(empty) == 0
    assert list(empty.columns) == list(full.columns)
    numbers = [name for name, kind in full.dtypes.items() if kind.kind in "iufb"]
    assert (empty.dtypes[numbers] == full.dtypes[numbers]).all()
