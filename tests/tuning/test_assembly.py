"""The sentences of a result, and where its figures come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune_loader import TuningResult, tune
from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    on_simulated_machines,
    simulated_result,
    simulated_run,
    simulated_search,
)

BUSY = SimulatedMachine(cores=2, cpu_s=0.06, step_s=0.06, step_cores=2.0, noise_sd=0.1, neighbours=2.0)
WAITING = SimulatedMachine(cores=4, cpu_s=0.001, wait_s=0.1, step_s=0.001, noise_sd=0.0)


@pytest.mark.parametrize(
    ("machine", "budget_s", "why"),
    [
        (BUSY, 20.0, "Other processes kept the cores busy in "),
        (WAITING, 1.0, "The budget ended before a second configuration was measured"),
    ],
    ids=["beside busy processes", "a budget for one configuration"],
)
def test_a_guess_says_first_that_it_is_one(machine: SimulatedMachine, budget_s: float, why: str) -> None:
    found = simulated_result(machine, budget_s=budget_s)
    assert found.status == "undecided"
    assert " ".join(str(found).split()).startswith(why)
    assert "Nothing that was tried is faster" not in found.report() + str(found)
    assert machine is BUSY or not any(each.kind == "more_workers" for each in found.advice)


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
    return tune([0] * 10_000, batch_size=32, progress=False, **given)


def test_the_file_is_rewritten_after_every_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, seen, original = tmp_path / "loader.json", list[tuple[str, int]](), TuningResult.save

    def save(self: TuningResult, where: Any) -> None:
        original(self, where)
        loaded = TuningResult.load(path)
        seen.append((loaded.status, sum(trial.round is None for trial in loaded.trials)))

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
    assert "No configuration worked" in str(result)
    assert TuningResult.load(tmp_path / "x.json").status == "fallback"
    assert [each.kind for each in result.warnings if "broken in" in each.sentence] == ["failed"]


def test_an_interrupted_search_says_so_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Any:
            if len(self.bursts) == 3:
                raise KeyboardInterrupt
            return super().burst(config, plan)

    result = tuned(monkeypatch, Interrupted)
    assert (result.status, len(result.trials)) == ("partial", 3)
    assert result.ended is not None
    assert result.ended.kind == "interrupted"
