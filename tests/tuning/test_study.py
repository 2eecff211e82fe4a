"""The study of a run, on simulated machines with a fake clock: who proposes, what is told and kept, why it ends."""

import functools
import os
import pickle
import stat
from dataclasses import replace
from unittest.mock import Mock

import optuna
import pytest

from autotune_loader.diagnosis import Ended
from autotune_loader.search.sampler import ROUND, TwinSampler
from autotune_loader.search.space import Space
from autotune_loader.tuning.assemble import assembled
from autotune_loader.tuning.study import MOST_REPEATS, open_study
from autotune_loader.values import Failure, LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import simulated_run, simulated_search

OWN = LoaderConfig(num_workers=2)
FAST_STEP = SimulatedMachine(step_s=0.001)


def search_on(machine, *, own=OWN, probe=SimulatedProbe, space=None, **given):
    clock = FakeClock()
    return simulated_search(probe(machine, clock), simulated_run(machine, space, own=own), clock, **given), clock


def searched(found):
    """What ran alone."""
    return [trial for trial in found.trials if trial.round is None]


def configs(found):
    return [trial.config for trial in searched(found)]


def test_the_study_holds_every_burst_of_search_and_rounds_and_the_choice():
    told = Mock()
    found, _ = search_on(FAST_STEP, progress=told)
    result = assembled(found, 1.0)
    trials, study = found.trials, found.study
    # THEN the user's own comes first; parameters of the study are those of the configurations that ran, none is clipped
    assert trials[0].config == OWN
    assert [each.params["num_workers"] for each in study.trials] == [each.config.num_workers for each in trials]
    assert [each.user_attrs.get(ROUND) for each in study.trials] == [each.round for each in trials]
    best = max(trials, key=lambda each: each.samples_per_s or 0.0)
    assert (study.best_params, study.best_value) == (found.run.space.params(best.config), best.samples_per_s)
    # AND the sampler that proposed is the study's, progress heard of everything, and pickled it is whole
    assert (type(study.sampler), result.study) == (TwinSampler, study)
    assert [call.args[0] for call in told.trial.call_args_list] == trials
    rounds = found.belief.rounds
    assert [call.args[0] for call in told.round.call_args_list] == list(range(1, len(rounds) + 1))
    assert len(pickle.loads(pickle.dumps(study)).trials) == len(trials)
    # AND the choice ran in two rounds
    assert sum(result.best in each.rates for each in rounds) >= 2


@pytest.mark.parametrize("storage", ["study.journal", "sqlite:///study.db"])
def test_a_study_that_is_kept_is_gone_on_with_and_what_others_run_is_left(storage, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(functools.partial(os.umask, os.umask(0)))
    # GIVEN a search that was told to end after some trials, and another process that stands still in one more
    theirs = open_study(storage)
    before, _ = search_on(FAST_STEP, study=theirs, budget_s=3.0)
    first, theirs.sampler = searched(before), before.twin
    before.twin.seconds_left = None
    running = Space(also=(OWN,)).suggest(theirs.ask())
    assert len(first) >= 2
    assert running not in [trial.config for trial in first]
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.journal")] in ([], [0o600])
    # WHEN the same job is tuned with the same storage
    found, _ = search_on(FAST_STEP, study=open_study(storage), budget_s=5.0)
    # THEN what was measured is known, none of it is run again in the search, and the trial of the other one is left to it
    known = searched(found)[: len(first)]
    assert found.belief.twin is not None
    assert [(each.config, each.samples_per_s) for each in known] == [(e.config, e.samples_per_s) for e in first]
    assert len({*configs(found), running}) == len(configs(found)) + 1 > len(first) + 1
    assert [each.state.name for each in theirs.get_trials()].count("RUNNING") == 1
    # AND another job is refused by name
    with pytest.raises(ValueError, match=r"has trials of another job .*; a separate study for each job would work"):
        search_on(replace(FAST_STEP, batch_size=64), study=open_study(storage))


@pytest.mark.parametrize(
    "storage", ["nodb://me:swordfish@host/db", "postgresql+nodriver://me:swo:rd@fish@host/db", "/dev/null/x.journal"]
)
def test_a_storage_that_cannot_be_opened_is_refused_without_its_password(storage):
    with pytest.raises(ValueError, match=r"cannot be opened \(\w+\); storage='study.journal' would work") as caught:
        open_study(storage)
    assert "fish" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_another_sampler_proposes_until_it_repeats_itself():
    # GIVEN a space of three configurations
    space, sampler = Space(max_workers=1, prefetch_factors=(1, 2)), optuna.samplers.TPESampler(seed=0)
    found, _ = search_on(FAST_STEP, sampler=sampler, own=None, space=space, budget_s=1000.0)
    assert found.study.sampler == sampler
    assert len({*configs(found)[-MOST_REPEATS - 1 :]}) <= 3
    assert len(configs(found)) < 60
    # AND then what it has found takes turns, as trials of the study, too
    assert len(found.belief.rounds) >= 2
    assert {c for each in found.belief.rounds for c in each.rates} <= {*configs(found)}


def test_a_grid_of_workers_alone_is_searched():
    grid = optuna.samplers.GridSampler({"num_workers": [0, 2, 4]})
    found, _ = search_on(FAST_STEP, sampler=grid, own=None, budget_s=10.0)
    assert {config.num_workers for config in configs(found)} >= {0, 2, 4}
    assert all(trial.measurement for trial in found.trials)


NO_CEILING = SimulatedMachine(step_s=0.005, noise_sd=0.03)
TWO_KEEP_UP = SimulatedMachine(cpu_s=0.01, step_s=0.03)


@pytest.mark.parametrize(("machine", "budget_s"), [(TWO_KEEP_UP, 60.0), (NO_CEILING, 8.0), (NO_CEILING, 60.0)])
def test_a_search_ends_at_the_ceiling_or_in_time_for_rounds(machine, budget_s):
    found, clock = search_on(machine, budget_s=budget_s)
    if machine is TWO_KEEP_UP:
        assert found.ended is Ended.CEILING
        assert len(searched(found)) <= 8
    # THEN the time is kept, but for one round that was under way
    assert clock() < budget_s + 5
    assert found.belief.rounds


def failing(kind, beyond):
    """From so many workers on."""
    failure = Failure(kind=kind, phase="batches", message="the driver said no")
    return lambda config: failure if config.num_workers > beyond else None


class Hanging(SimulatedProbe):
    """Takes the whole deadline for what fails by it."""

    def burst(self, config, plan):
        outcome = super().burst(config, plan)
        self._clock.advance(plan.deadline_s if getattr(outcome, "kind", "") == "deadline" else 0.0)
        return outcome


def test_failures_are_pruned_with_their_reason_never_the_best_and_in_silence(capfd):
    before = optuna.logging.get_verbosity()
    found, _ = search_on(replace(FAST_STEP, fails=failing("crashed", beyond=3)))
    pruned = {each.number: each for each in found.study.trials if each.state.name == "PRUNED"}
    assert pruned.keys() == {each.number for each in searched(found) if each.failure is not None} != set()
    assert all("the driver said no" in each.user_attrs["autotune_loader"] for each in pruned.values())
    assert found.study.best_params["num_workers"] <= 3
    # AND none of them is proposed again, and Optuna says nothing, as chatty as it is otherwise
    assert len(configs(found)) == len({*configs(found)})
    assert (before, capfd.readouterr()) == (optuna.logging.get_verbosity(), ("", ""))


@pytest.mark.parametrize("kind", ["oom_killed", "deadline"])
@pytest.mark.parametrize(("cores", "own", "safe"), [(2, LoaderConfig(num_workers=8), 3), (16, None, 2)])
def test_where_workers_are_killed_or_hang_the_most_that_are_safe_are_found(kind, cores, own, safe):
    # GIVEN a job for which every worker helps, on a machine where few can be had, perhaps fewer than the user's
    machine = SimulatedMachine(cores=cores, cpu_s=0.01, wait_s=0.02, step_s=0.001, fails=failing(kind, beyond=safe))
    found, clock = search_on(machine, own=own, probe=Hanging)
    assert assembled(found, clock()).best.num_workers == safe
    assert clock() <= 62


def test_a_failure_that_may_pass_is_tried_once_more():
    answers = [Failure(kind="crashed", phase="start", message="chance", retryable=True)]
    machine = replace(FAST_STEP, fails=lambda config: answers.pop() if config == OWN and answers else None)
    found, _ = search_on(machine, budget_s=3.0)
    assert not answers
    assert all(trial.measurement for trial in found.trials)


@pytest.mark.parametrize("own", [None, OWN])
def test_with_one_legal_configuration_the_search_ends(own):
    found, clock = search_on(FAST_STEP, own=own, space=Space(max_workers=0), budget_s=5.0)
    assert clock() <= 6
    assert assembled(found, clock()).status == "complete"


def test_what_an_earlier_run_was_allowed_is_not_chosen_by_one_that_is_not():
    wide, study = Space(in_order=(True, False)), open_study()
    before = len(search_on(FAST_STEP, space=wide, study=study, budget_s=8.0)[0].trials)
    odd = LoaderConfig(num_workers=5, prefetch_factor=8, in_order=False)
    found, clock = search_on(FAST_STEP, space=Space(max_workers=2), study=study, suggestions=[odd], budget_s=8.0)
    best = assembled(found, clock()).best
    assert (best.in_order, best.num_workers <= 2) == (True, True)
    assert odd not in [trial.config for trial in found.trials[before:]]


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["crashed", "deadline"])
def test_where_everything_fails_after_some_bursts_the_search_ends_with_a_result(kind, after):
    answers = [None] * after
    broken = Failure(kind=kind, phase="batches", message="no more")
    machine = replace(FAST_STEP, fails=lambda config: answers.pop() if answers else broken)
    found, clock = search_on(machine, probe=Hanging, budget_s=30.0)
    result = assembled(found, clock())
    assert len(found.trials) < after + 12
    assert clock() < 30.0 + 2 * 20.0
    assert after or result.status == "fallback"
