from __future__ import annotations

import pytest
from report.example import BEST, synthetic_result

from autotune_loader.report.frame import trials_frame
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return synthetic_result()


def test_has_one_row_per_trial_in_order(result: TuningResult) -> None:
    frame = trials_frame(result)
    assert list(frame["number"]) == [trial.number for trial in result.trials]


def test_a_row_holds_the_configuration_and_what_was_measured(result: TuningResult) -> None:
    # GIVEN the trial of the best configuration
    trial = next(trial for trial in result.trials if trial.config == BEST)
    measurement = trial.measurement
    # WHEN its row is looked up
    row = trials_frame(result).set_index("number").loc[trial.number]
    # THEN every value is the trial's own
    assert (row["num_workers"], row["prefetch_factor"], row["consumer_threads"]) == (4, 4, 1)
    assert row["samples_per_s"] == measurement.samples_per_s.value
    assert row["samples_per_s_low"] == measurement.samples_per_s.low
    assert row["wait_share"] == measurement.wait_share
    assert row["pss_bytes"] == measurement.memory.pss_bytes


def test_prefetch_factor_stays_an_integer_beside_trials_without_one(result: TuningResult) -> None:
    # GIVEN a study with 0 workers (no prefetch_factor) among others
    column = trials_frame(result)["prefetch_factor"]
    # THEN missing is missing and the others are whole numbers
    assert str(column.dtype) == "Int64"
    assert column.isna().sum() == 1


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
