"""The study of a run, on simulated machines with a fake clock: who proposes, what is told, why it ends, what an end keeps."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest

from autotune_loader.diagnosis import Ended
from autotune_loader.search.sampler import TwinSampler
from autotune_loader.search.space import Space
from autotune_loader.tuning.assemble import assembled
from autotune_loader.tuning.study import CHOSEN, MOST_REPEATS, ROUNDS, Search, open_study
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BurstPlan, Failure, Measurement
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import simulated_run, simulated_search

OWN = LoaderConfig(num_workers=2)
FAST_STEP = SimulatedMachine(step_s=0.001)


def run_on(
    machine: SimulatedMachine,
    *,
    own: LoaderConfig | None = OWN,
    probe: Any = None,
    space: Space | None = None,
    **given: Any,
) -> tuple[Search, SimulatedProbe, FakeClock]:
    clock = FakeClock()
    probe = probe or SimulatedProbe(machine, clock)
    probe._clock = clock
    return simulated_search(probe, simulated_run(machine, space, own=own), clock, **given), probe, clock


def searched(found: Search) -> list[Any]:
    return [trial for trial in found.trials if trial.round is None]


# What the study holds


def test_the_study_holds_exactly_what_ran_the_rounds_and_the_choice() -> None:
    told = Mock()
    found, probe, _ = run_on(FAST_STEP, progress=told)
    result = assembled(found, 1.0)
    found.tell(result.best)
    trials, study = searched(found), found.study
    # THEN the user's own comes first; parameters of the study are those of the configurations that ran, none is clipped
    assert trials[0].config == OWN
    assert [each.params["num_workers"] for each in study.trials] == [each.config.num_workers for each in trials]
    assert [each.number for each in study.trials] == [each.number for each in trials]
    assert {each.config for each in trials} <= set(probe.bursts)
    best = max(trials, key=lambda each: each.samples_per_s or 0.0)
    assert study.best_params == found.run.space.params(best.config)
    assert study.best_value == best.samples_per_s
    # AND the sampler that proposed is the study's, and progress heard of everything
    assert type(study.sampler) is TwinSampler
    assert [call.args[0] for call in told.trial.call_args_list] == trials
    rounds = [call.args[0] for call in told.round.call_args_list]
    assert rounds == [*range(1, len(rounds) + 1)]
    assert min(call.args[-1] for call in told.trial.call_args_list) >= 0
    # AND choice and rounds are its attributes
    assert LoaderConfig.from_dict(study.user_attrs[CHOSEN]) == result.best
    assert len(study.user_attrs[ROUNDS]) == len(rounds) > 0
    assert study.user_attrs[ROUNDS][0][str(OWN)] == pytest.approx(result.rates_of(OWN)[0])
    assert result.study is study


@pytest.mark.parametrize(
    ("storage", "mode"), [("study.journal", 0o600), ("sqlite:///study.db", None)], ids=["journal", "sqlite"]
)
def test_a_study_that_is_kept_is_gone_on_with(
    storage: str, mode: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    before_umask = os.umask(0)
    request.addfinalizer(lambda: os.umask(before_umask) and None)
    # GIVEN a search that was told to end after two trials
    first, _, _ = run_on(FAST_STEP, study=open_study(storage), budget_s=6.0)
    before = searched(first)
    assert len(before) >= 2
    if mode is not None:
        assert stat.S_IMODE(Path(storage).stat().st_mode) == mode
    # WHEN the same job is tuned with the same storage
    found, _, _ = run_on(FAST_STEP, study=open_study(storage))
    # THEN what was measured is known, without histories, and none of it is run again in the search
    known = searched(found)
    assert [each.config for each in known[: len(before)]] == [each.config for each in before]
    assert [each.samples_per_s for each in known[: len(before)]] == [each.samples_per_s for each in before]
    assert len({each.config for each in known}) == len(known)
    # AND another job is refused by name
    with pytest.raises(ValueError, match=r"has trials of another job .*; a study of its own for each job would work"):
        run_on(replace(FAST_STEP, batch_size=64), study=open_study(storage))


@pytest.mark.parametrize(
    "storage",
    [
        "nodb://me:swordfish@host/db",
        "postgresql+nodriver://me:swo:rd@fish@host/db",
        "/dev/null/study.journal",
    ],
)
def test_a_storage_that_cannot_be_opened_is_refused_without_its_password(storage: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be opened \(\w+\); storage='study.journal' would work") as caught:
        open_study(storage)
    assert "fish" not in str(caught.value)
    assert caught.value.__suppress_context__


# Who proposes


def test_another_sampler_proposes_until_it_repeats_itself() -> None:
    # GIVEN a space of three configurations
    space, sampler = Space(max_workers=1, prefetch_factors=(1, 2)), optuna.samplers.TPESampler(seed=0)
    found, _, _ = run_on(FAST_STEP, sampler=sampler, own=None, space=space, budget_s=1000.0)
    trials = searched(found)
    assert found.study.sampler is sampler
    assert found.ended is Ended.SAMPLER
    assert len({each.config for each in trials[-MOST_REPEATS - 1 :]}) <= 3
    assert len(trials) < 60


# Ends


def test_a_search_ends_at_the_ceiling_of_the_step() -> None:
    # GIVEN a step that two workers keep busy
    found, _, _ = run_on(SimulatedMachine(cpu_s=0.01, step_s=0.03))
    assert found.ended is Ended.CEILING
    assert len(searched(found)) <= 8


@pytest.mark.parametrize("budget_s", [8.0, 60.0])
def test_the_budget_holds_and_leaves_time_for_rounds(budget_s: float) -> None:
    # GIVEN a machine on which no configuration reaches the ceiling
    found, _, clock = run_on(SimulatedMachine(step_s=0.005, noise_sd=0.03), budget_s=budget_s)
    # THEN the time is kept, but for one round that was under way
    assert clock() < budget_s + 5
    assert found.outcome is not None
    assert found.outcome.rounds


# Failures


def failing(kind: Any, when: Any) -> Any:
    answer = Failure(kind=kind, phase="batches", message="the driver said no")
    return lambda config: answer if when(config) else None


class Hanging(SimulatedProbe):
    """Hangs with more workers than are safe."""

    safe = 0

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        if config.num_workers <= self.safe:
            return super().burst(config, plan)
        self._clock.advance(plan.deadline_s)
        return Failure(kind="deadline", phase="batches", message="hangs")


def test_failures_are_pruned_with_their_reason_never_the_best_and_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    found, _, _ = run_on(replace(FAST_STEP, fails=failing("crashed", lambda config: config.num_workers > 3)))
    pruned = [each for each in found.study.trials if each.state.name == "PRUNED"]
    assert pruned
    failures = {each.number: each.failure for each in searched(found) if each.failure is not None}
    assert {each.number for each in pruned} == failures.keys()
    assert all("the driver said no" in each.user_attrs["autotune_loader"] for each in pruned)
    assert found.study.best_params["num_workers"] <= 3
    # AND none of them is proposed again, and Optuna says nothing, as chatty as it is otherwise
    configs = [each.config for each in searched(found)]
    assert len(configs) == len(set(configs))
    assert (before, capfd.readouterr()) == (optuna.logging.get_verbosity(), ("", ""))


@pytest.mark.parametrize("kind", ["oom_killed", "deadline"])
@pytest.mark.parametrize(("cores", "own", "safe"), [(2, 8, 3), (16, None, 2)])
def test_where_workers_are_killed_or_hang_the_most_that_are_safe_are_found(
    kind: str, cores: int, own: int | None, safe: int
) -> None:
    # GIVEN a job for which every worker helps, on a machine where few can be had
    machine = SimulatedMachine(cores=cores, cpu_s=0.01, wait_s=0.02, step_s=0.001)
    probe: Any = Hanging(machine, FakeClock())
    probe.safe = safe
    if kind != "deadline":
        machine = replace(machine, fails=failing(kind, lambda config: config.num_workers > safe))
        probe = SimulatedProbe(machine, FakeClock())
    # WHEN it is searched, be it from a configuration that fails
    found, _, clock = run_on(machine, own=LoaderConfig(num_workers=own) if own else None, probe=probe)
    # THEN these are chosen, in time
    assert found.outcome is not None
    assert found.outcome.winner.num_workers == safe
    assert clock() <= 62


def test_a_failure_that_may_pass_is_tried_once_more() -> None:
    # GIVEN a configuration that fails the first time only
    answers = [Failure(kind="crashed", phase="start", message="chance", retryable=True)]
    machine = replace(FAST_STEP, fails=lambda config: answers.pop() if config.num_workers == 2 and answers else None)
    found, _, _ = run_on(machine)
    assert not answers
    assert all(trial.measurement for trial in found.trials)
