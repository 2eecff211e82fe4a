"""The sentences of a result, and where its figures come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from autotune_loader.report.summary import why_undecided

from autotune_loader import TuningResult, tune
from autotune_loader.decision.race import RaceOutcome
from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure
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


def outcome(rounds: int, *, foreign: float = 0.0, **changes: Any) -> RaceOutcome:
    one, two = LoaderConfig(), LoaderConfig(num_workers=1)
    measured = Round(rates={one: 100.0, two: 200.0}, foreign_cpu_share=foreign)
    known: dict[str, Any] = {
        "configs": (one, two),
        "rounds": (measured,) * rounds,
        "winner": two,
        "rate": Interval(value=200.0, low=200.0, high=200.0, count=rounds),
        "expected_loss": 0.0,
    }
    return RaceOutcome(**{"bursts": {}, "as_fast": (), "speedup": None, **known, **changes})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no paired round fitted into the budget"),
        (outcome(1), "only 1 paired round fitted into the budget; a larger budget would decide it"),
        (outcome(5, foreign=0.5), "busy in 5 of 5 paired rounds; tuning again while the machine is quiet"),
        (outcome(5, expected_loss=0.05), "something else may be faster by more than the tolerance"),
        (outcome(5), None),
        (outcome(1, configs=(LoaderConfig(),)), None),  # no choice
        (outcome(2, foreign=0.5, expected_loss=0.05, at_ceiling=True), None),  # the step alone is no faster
    ],
)
def test_what_was_not_decided_is_told_with_what_would_decide_it(found: RaceOutcome | None, words: str | None) -> None:
    told = why_undecided(found, 0.02)
    assert told is None if words is None else words in told


BUSY = SimulatedMachine(cores=2, cpu_s=0.06, step_s=0.06, step_cores=2.0, noise_sd=0.1, neighbours=2.0)
WAITING = SimulatedMachine(cores=4, cpu_s=0.001, wait_s=0.1, step_s=0.001, noise_sd=0.0)


@pytest.mark.parametrize(
    ("machine", "budget_s", "why"),
    [
        (BUSY, 20.0, "other processes kept the cores busy in "),
        (WAITING, 1.0, "the budget ended before a second configuration could be measured"),
    ],
    ids=["beside busy processes", "a budget for one configuration"],
)
def test_a_guess_says_first_that_it_is_one(machine: SimulatedMachine, budget_s: float, why: str) -> None:
    found = simulated_result(machine, budget_s=budget_s)
    assert found.status == "undecided"
    assert str(found).startswith(f"Not decided: {why}")
    assert "nothing else is worth its cost" not in found.report() + str(found)
    assert machine is BUSY or not any("Allow more workers" in each.action for each in found.advice)


def test_the_ceiling_is_measured_again_beside_the_finals() -> None:
    # GIVEN neighbours that come after the step was timed alone and take half of its speed
    machine = SimulatedMachine(cores=2, cpu_s=0.004, step_s=0.03, step_cores=2.0, neighbours=0.0)
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock)
    run = simulated_run(machine, Space(max_workers=4), epoch_batches=10_000)
    come = SimpleNamespace(
        trial=lambda *_: setattr(probe, "machine", replace(machine, neighbours=2.0)), finals_round=lambda *_: None
    )
    state = simulated_search(probe, run, clock, listener=come, budget_s=40.0)
    # THEN the ceiling is that of the step under the load that the rounds ran under
    alone = max(each.samples_per_s.value for each in state.ceilings.values())
    ceiling = state.ceiling_of(state.finals.winner)
    assert ceiling.value == pytest.approx(alone / 2, rel=0.1)
    assert state.finals.rate.value < 1.08 * ceiling.value


def tuned(
    monkeypatch: pytest.MonkeyPatch, probe: Any = SimulatedProbe, fails: Any = None, **given: Any
) -> TuningResult:
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine(fails=fails), probe)
    return tune([0] * 10_000, batch_size=32, reuse=False, progress=False, **given)


def test_the_file_is_rewritten_after_every_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, seen, original = tmp_path / "loader.json", list[tuple[str, int]](), TuningResult.save

    def save(self: TuningResult, where: Any) -> None:
        original(self, where)
        seen.append((TuningResult.load(path).status, len(TuningResult.load(path).trials)))

    monkeypatch.setattr(TuningResult, "save", save)
    tuned(monkeypatch, output=path, max_trials=2)
    assert seen == [("partial", 1), ("partial", 2), ("complete", 2)]


def test_when_every_trial_fails_the_defaults_are_given_with_the_distinct_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(config: LoaderConfig) -> Failure:
        place = "a worker" if config.num_workers else "the main process"
        return Failure(kind="user_exception", phase="batches", message=f"broken in {place}")

    result = tuned(monkeypatch, fails=fails, output=tmp_path / "x.json", max_trials=4)
    assert (result.status, result.best) == ("fallback", LoaderConfig())
    assert {"user_exception: broken in a worker", "user_exception: broken in the main process"} <= {*result.summary}
    assert TuningResult.load(tmp_path / "x.json").status == "fallback"
    assert any("failed (user_exception)" in warning for warning in result.warnings)


def test_a_bad_sample_is_named_first_and_is_no_property_of_a_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Any:
            return replace(
                super().burst(config, plan), bad_samples=(BadSample(name="sample 40", error="ValueError: no"),)
            )

    result = tuned(monkeypatch, Broken, output=tmp_path / "x.json", max_trials=3)
    assert result.warnings[0].startswith("sample 40 raises ValueError: no; training will end there")
    assert all(trial.failure is None for trial in result.trials)
    assert TuningResult.load(tmp_path / "x.json").warnings == result.warnings


def test_an_interrupted_search_says_so_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Any:
            if len(self.bursts) == 3:
                raise KeyboardInterrupt
            return super().burst(config, plan)

    result = tuned(monkeypatch, Interrupted)
    assert (result.status, len(result.trials)) == ("partial", 3)
    assert result.summary[0].startswith("Interrupted")
