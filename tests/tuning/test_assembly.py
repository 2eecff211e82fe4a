"""The sentences of a result, and where its figures come from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune_loader import TuningResult, tune
from autotune_loader.decision.race import RaceOutcome
from autotune_loader.decision.space import Space
from autotune_loader.report.standings import standings
from autotune_loader.report.summary import rate_words, speedup_sentence, why_undecided
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, Round
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    on_simulated_machines,
    simulated_result,
    simulated_run,
    simulated_search,
)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1000.0, 1200.0, "1,100 samples/s (1,000 to 1,200)"),
        (-1900.0, 12900.0, "about 1,100 samples/s, too few or too noisy bursts for an interval"),
        (-math.inf, math.inf, "about 1,100 samples/s, too few or too noisy bursts for an interval"),
    ],
)
def test_a_rate_has_an_interval_only_where_it_tells_something(low: float, high: float, words: str) -> None:
    assert rate_words(Interval(value=1100.0, low=low, high=high, count=3)) == words


def outcome(rates: float, *, rounds: int, foreign: float = 0.0, expected_loss: float = 0.0) -> RaceOutcome:
    one, two = LoaderConfig(), LoaderConfig(num_workers=1)
    measured = Round(rates={one: rates, two: 2 * rates}, foreign_cpu_share=foreign)
    return RaceOutcome(
        configs=(one, two),
        rounds=(measured,) * rounds,
        winner=two,
        rate=Interval(value=2 * rates, low=2 * rates, high=2 * rates, count=rounds),
        bursts={},
        as_fast=(),
        expected_loss=expected_loss,
        speedup=None,
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no paired round fitted into the budget"),
        (outcome(100.0, rounds=1), "only 1 paired round fitted into the budget; a larger budget would decide it"),
        (
            outcome(100.0, rounds=5, foreign=0.5),
            "busy in 5 of 5 paired rounds; tuning again while the machine is quiet",
        ),
        (outcome(100.0, rounds=5, expected_loss=0.05), "something else may be faster by more than the tolerance"),
    ],
)
def test_what_was_not_decided_is_told_with_what_would_decide_it(found: RaceOutcome | None, words: str) -> None:
    assert words in (why_undecided(found, 0.02) or "")


def test_enough_quiet_rounds_decide_and_so_does_having_no_choice() -> None:
    assert why_undecided(outcome(100.0, rounds=5), 0.02) is None
    alone = replace(outcome(100.0, rounds=1), configs=(LoaderConfig(),))
    assert why_undecided(alone, 0.02) is None
    # WHEN nothing can be faster, because the step alone is not, two disturbed rounds are enough
    at_ceiling = replace(outcome(100.0, rounds=2, foreign=0.5, expected_loss=0.05), at_ceiling=True)
    assert why_undecided(at_ceiling, 0.02) is None


BUSY = SimulatedMachine(cores=2, cpu_s=0.06, step_s=0.06, step_cores=2.0, noise_sd=0.1, neighbours=2.0)


def test_a_choice_beside_busy_processes_says_first_that_it_is_a_guess() -> None:
    found = simulated_result(BUSY, budget_s=20.0)
    assert found.status == "undecided"
    assert str(found).startswith("Not decided: other processes kept the cores busy in ")
    assert found.report().startswith("Not decided: other processes kept the cores busy in ")
    assert "nothing else is worth its cost" not in found.report() + str(found)


def test_a_budget_for_one_configuration_alone_decides_nothing() -> None:
    # GIVEN fetches that wait, so that workers would help, and time for the baseline alone
    machine = SimulatedMachine(cores=4, cpu_s=0.001, wait_s=0.1, step_s=0.001, noise_sd=0.0)

    found = simulated_result(machine, budget_s=1.0)

    assert len(found.trials) == 1
    assert found.status == "undecided"
    assert str(found).startswith("Not decided: the budget ended before a second configuration could be measured")
    assert "nothing else is worth its cost" not in str(found)
    assert not any("Allow more workers" in each.action for each in found.advice)


def test_the_ceiling_is_measured_again_beside_the_finals() -> None:
    # GIVEN neighbours that come after the step was timed alone and take half of its speed
    machine = SimulatedMachine(cores=2, cpu_s=0.004, step_s=0.03, step_cores=2.0, neighbours=0.0)
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock)
    run = simulated_run(machine, Space(max_workers=4), epoch_batches=10_000)

    class Coming:
        def trial(self, *_: object) -> None:
            probe.machine = replace(machine, neighbours=2.0)

        def finals_round(self, *_: object) -> None: ...

    state = simulated_search(probe, run, clock, listener=Coming(), budget_s=40.0)
    # THEN the ceiling is that of the step under the load that the rounds ran under
    alone = max(each.samples_per_s.value for each in state.ceilings.values())
    ceiling = state.ceiling_of(state.finals.winner)
    assert ceiling.value == pytest.approx(alone / 2, rel=0.1)
    assert state.finals.rate.value < 1.08 * ceiling.value


def test_every_figure_of_the_chosen_one_is_from_its_rounds() -> None:
    found = simulated_result(SimulatedMachine(noise_sd=0.03))
    row = next(row for row in standings(found) if row.is_best)
    before = next(row for row in standings(found) if row.is_baseline)
    assert row.rate == found.measured.samples_per_s
    assert before.rate == found.measured.baseline_samples_per_s
    assert row.measurement.wait_share == found.measured.wait_share
    assert found.measured.wait_interval.low < found.measured.wait_share < found.measured.wait_interval.high
    assert found.measured.wait_interval.count == row.rate.count


def test_a_speed_up_of_too_few_rounds_is_told_as_the_report_has_it() -> None:
    unsure = Interval(value=3.23, low=0.0026, high=4004.0, count=2)
    told = speedup_sentence(LoaderConfig(num_workers=8), LoaderConfig(), unsure, is_decided=False)
    assert told == (
        "It was 3.23x as fast as 0 workers (before tuning) in 2 paired rounds, too few or too noisy for an interval."
    )


def test_the_file_is_rewritten_after_every_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, seen, original = tmp_path / "loader.json", list[tuple[str, int]](), TuningResult.save

    def save(self: TuningResult, where: Any) -> None:
        original(self, where)
        seen.append((TuningResult.load(path).status, len(TuningResult.load(path).trials)))

    monkeypatch.setattr(TuningResult, "save", save)
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine())
    tune([0] * 10_000, batch_size=32, output=path, max_trials=2, reuse=False, progress=False)
    assert seen == [("partial", 1), ("partial", 2), ("complete", 2)]


def test_when_every_trial_fails_the_defaults_are_given_with_the_distinct_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(config: LoaderConfig) -> Failure:
        place = "a worker" if config.num_workers else "the main process"
        return Failure(kind="user_exception", phase="batches", message=f"broken in {place}")

    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine(fails=fails))
    result = tune([0] * 10_000, batch_size=32, output=tmp_path / "x.json", max_trials=4, reuse=False, progress=False)
    assert (result.status, result.best) == ("fallback", LoaderConfig())
    assert {"user_exception: broken in a worker", "user_exception: broken in the main process"} <= {*result.summary}
    assert TuningResult.load(tmp_path / "x.json").status == "fallback"
    assert any("failed (user_exception)" in warning for warning in result.warnings)


def test_an_interrupted_search_says_so_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Any:
            if len(self.bursts) == 3:
                raise KeyboardInterrupt
            return super().burst(config, plan)

    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine(), Interrupted)
    result = tune([0] * 10_000, batch_size=32, reuse=False, progress=False)
    assert (result.status, len(result.trials)) == ("partial", 3)
    assert result.summary[0].startswith("Interrupted")
