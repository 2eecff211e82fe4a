from __future__ import annotations

from dataclasses import replace

import pytest
from report.example import BEST, synthetic_result

from autotune_loader.report.frame import RIVAL_COLUMNS, rivals_frame
from autotune_loader.report.standings import standings
from autotune_loader.results.result import TuningResult


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return synthetic_result()


def test_each_configuration_has_a_row_with_what_is_known_of_it(result: TuningResult) -> None:
    frame = result.to_dataframe(per="configuration")
    assert list(frame.columns) == RIVAL_COLUMNS
    assert list(frame["configuration"]) == [str(row.config) for row in standings(result)]
    chosen = frame.set_index("configuration").loc[str(BEST)]
    rates = result.finals.rates_of(BEST)
    assert chosen["finals_samples_per_s"] == pytest.approx(sum(rates) / len(rates))
    assert chosen["search_samples_per_s"] == next(t.samples_per_s for t in result.trials if t.config == BEST)
    assert chosen["predicted_samples_per_s"] > 0


def test_each_rival_has_its_reason(result: TuningResult) -> None:
    why = rivals_frame(result).set_index("configuration")["why"]
    assert why[str(BEST)] == "chosen"
    raced = {str(config) for config in result.finals.configs} - {str(BEST)}
    assert all("in 9 paired rounds" in why[name] for name in raced)
    assert why[str(result.baseline)].startswith("slower: 0.")
    failed = {str(trial.config): trial.failure.message for trial in result.trials if trial.failure}
    assert {why[name] for name in failed} == {f"failed: {message}" for message in failed.values()}
    others = set(why.index) - raced - set(failed) - {str(BEST)}
    assert others
    assert all(why[name].startswith("not in the paired rounds: ") for name in others)


def test_a_mistyped_row_is_answered_with_what_works(result: TuningResult) -> None:
    with pytest.raises(ValueError, match="per='worker' is neither 'trial' nor 'configuration'"):
        result.to_dataframe(per="worker")


def test_who_was_as_fast_to_the_last_digit_is_not_called_slower(result: TuningResult) -> None:
    rival = next(config for config in result.finals.configs if config not in (BEST, result.baseline))
    rates = tuple(0.999 * 1000.0 if config == rival else 1000.0 for config in result.finals.configs)
    told = replace(result, finals=replace(result.finals, rounds=(rates,), as_fast=()))
    why = rivals_frame(told).set_index("configuration")["why"]
    assert why[str(rival)] == "no faster: 1.00 times the chosen one's rate in 1 paired round"
