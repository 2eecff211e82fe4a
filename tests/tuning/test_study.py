"""The study of a run on simulated machines: who proposes, what is kept, why it ends; what is chosen, and what is a guess."""

import contextlib
import functools
import os
import pickle
import stat
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import optuna
import pytest

from autotune_loader.diagnosis import Caution, Ended, Source, Undecided
from autotune_loader.diagnosis.judge import source_of
from autotune_loader.search.belief import Belief
from autotune_loader.search.sampler import ROUND, TwinSampler
from autotune_loader.search.space import Context, Space
from autotune_loader.tuning.assemble import assembled, choice_of
from autotune_loader.tuning.bursting import CLONED_S, Budget, Bursts
from autotune_loader.tuning.study import MOST_REPEATS, open_study
from autotune_loader.values import Failure, Interval, LoaderConfig, Trial
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_trials,
    with_workers,
)
from tests.support.tuned import simulated_result, simulated_run, simulated_search

DECIDED = (Ended.SAFE, Ended.CEILING, Ended.EXPECTED)
NONE, TWO = LoaderConfig(), with_workers(2)
FAST_STEP = SimulatedMachine(step_s=0.001)


def search_on(machine, *, own=TWO, probe=SimulatedProbe, space=None, **given):
    clock = FakeClock()
    return simulated_search(
        probe(machine, clock), simulated_run(machine, space, own=own), clock, **given
    ), clock


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
    assert trials[0].config == TWO
    assert [each.params["num_workers"] for each in study.trials] == [
        each.config.num_workers for each in trials
    ]
    assert [each.user_attrs.get(ROUND) for each in study.trials] == [each.round for each in trials]
    best = max(trials, key=lambda each: each.samples_per_s or 0.0)
    assert (study.best_params, study.best_value) == (
        found.run.space.params(best.config),
        best.samples_per_s,
    )
    # AND the sampler that proposed is the study's, progress heard of everything, and pickled it is whole
    assert (type(study.sampler), result.study) == (TwinSampler, study)
    assert [call.args[0] for call in told.trial.call_args_list] == trials
    rounds = found.belief.rounds
    assert [call.args[0] for call in told.round.call_args_list] == list(range(1, len(rounds) + 1))
    assert len(pickle.loads(pickle.dumps(study)).trials) == len(trials)
    # AND the choice ran in two rounds
    assert sum(result.best in each.rates for each in rounds) >= 2


@pytest.mark.parametrize("storage", ["study.journal", "sqlite:///study.db"])
def test_a_study_that_is_kept_is_gone_on_with_and_what_others_run_is_left(
    storage, tmp_path, monkeypatch, request
):
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(functools.partial(os.umask, os.umask(0)))
    # GIVEN a search that was told to end after some trials, and another process that stands still in one more
    theirs = open_study(storage)
    before, _ = search_on(FAST_STEP, study=theirs, budget_s=3.0)
    first, theirs.sampler = searched(before), before.twin
    before.twin.seconds_left = None
    running = Space(also=(TWO,)).suggest(theirs.ask())
    assert len(first) >= 2
    assert running not in [trial.config for trial in first]
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.journal")] in (
        [],
        [0o600],
    )
    # WHEN the same job is tuned with the same storage
    found, _ = search_on(FAST_STEP, study=open_study(storage), budget_s=10.0)
    # THEN what was measured is known, none of it is run again in the search, and the trial of the other one is left to it
    known = searched(found)[: len(first)]
    assert found.belief.twin is not None
    assert [(each.config, each.samples_per_s) for each in known] == [
        (e.config, e.samples_per_s) for e in first
    ]
    assert len({*configs(found), running}) == len(configs(found)) + 1 >= len(first) + 1
    assert [each.state.name for each in theirs.get_trials()].count("RUNNING") == 1
    # AND another job is refused by name
    with pytest.raises(
        ValueError, match=r"has trials of another job .*; a separate study for each job would work"
    ):
        search_on(replace(FAST_STEP, batch_size=64), study=open_study(storage))


@pytest.mark.parametrize(
    "storage",
    [
        "nodb://me:swordfish@host/db",
        "postgresql+nodriver://me:swo:rd@fish@host/db",
        "/dev/null/x.journal",
    ],
)
def test_a_storage_that_cannot_be_opened_is_refused_without_its_password(storage):
    with pytest.raises(
        ValueError, match=r"cannot be opened \(\w+\); storage='study.journal' would work"
    ) as caught:
        open_study(storage)
    assert "fish" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_second_run_with_a_study_looks_whether_its_rounds_still_hold():
    study = open_study()
    found, _ = search_on(FAST_STEP, study=study)
    rounds, before, choice = len(found.belief.rounds), len(found.trials), found.belief.choice
    assert (found.ended in DECIDED, rounds >= 2, choice != TWO) == (True, True, True)
    # WHEN nothing has changed THEN one round says so, with the choice, its rival and the user's own
    found, _ = search_on(FAST_STEP, study=study)
    new = [trial for trial in found.trials if trial.number >= before]
    assert [trial.round for trial in new][:3] == [before] * 3
    assert {choice.key(), TWO} <= {trial.config.key() for trial in new[:3]}
    # WHEN workers gain nothing any more THEN all rounds before count as one, and others follow
    again = len(found.trials)
    found, _ = search_on(
        replace(FAST_STEP, cores=4, fails=None, cpu_s=0.0001, receive_s=0.03), study=study
    )
    assert len({trial.round for trial in found.trials[:again]} - {None}) == 1
    assert len(found.belief.rounds) >= 2


@pytest.mark.parametrize(
    ("batch_bytes", "is_same"),
    [(1 << 20, True), (3 << 19, True), (3 << 20, False), (1 << 18, False)],
)
def test_a_study_is_of_batches_that_are_alike(batch_bytes, is_same):
    study, clock = open_study(), FakeClock()
    search_on(FAST_STEP, study=study, budget_s=2.0)
    run = simulated_run(FAST_STEP, own=TWO, batch_bytes=batch_bytes)
    told = (
        contextlib.nullcontext()
        if is_same
        else pytest.raises(ValueError, match=r"batches of .* a separate study")
    )
    with told:
        simulated_search(SimulatedProbe(FAST_STEP, clock), run, clock, study=study, budget_s=2.0)


class Lost(optuna.storages.InMemoryStorage):
    """A database that is gone after so many trials, while one of these methods is called."""

    def __init__(self, after, method):
        super().__init__()
        self._left, self._method = after, method

    def create_new_trial(self, *given, **named):
        self._left -= 1
        return self._answer("create_new_trial", *given, **named)

    def set_trial_param(self, *given, **named):
        return self._answer("set_trial_param", *given, **named)

    def set_trial_user_attr(self, *given, **named):
        return self._answer("set_trial_user_attr", *given, **named)

    def set_trial_state_values(self, *given, **named):
        return self._answer("set_trial_state_values", *given, **named)

    def get_all_trials(self, *given, **named):
        return self._answer("get_all_trials", *given, **named)

    def _answer(self, method, *given, **named):
        if method == self._method and self._left <= 0:
            raise OSError("database is locked")
        return getattr(super(), method)(*given, **named)


@pytest.mark.parametrize(
    "sampler", [None, optuna.samplers.RandomSampler(seed=0)], ids=["the twin", "another sampler"]
)
@pytest.mark.parametrize(
    "method",
    [
        "create_new_trial",
        "set_trial_param",
        "set_trial_user_attr",
        "get_all_trials",
        "set_trial_state_values",
    ],
)
def test_a_storage_that_fails_costs_a_warning_and_no_burst(method, sampler):
    study = optuna.create_study(direction="maximize", storage=Lost(6, method))
    before = study.sampler
    found, clock = search_on(FAST_STEP, study=study, sampler=sampler)
    result = assembled(found, clock())
    assert (result.rate is not None, study.sampler) == (True, before)
    assert any(
        "failed (OSError): the search went on in memory" in each.sentence
        for each in result.warnings
    )
    # THEN what ran before is known, and in the study of the result
    assert len([trial for trial in found.trials if trial.measurement and trial.number < 5]) == 5
    assert result.study is not study
    done = [each for each in result.study.trials if each.state.name == "COMPLETE"]
    assert [each.value for each in done] == [
        each.samples_per_s for each in found.trials if each.measurement
    ]


def test_another_error_of_a_trial_is_raised_as_it_is():
    class Broken(SimulatedProbe):
        def burst(self, config, plan):
            raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        search_on(FAST_STEP, probe=Broken, study=open_study())


def test_another_sampler_proposes_until_it_repeats_itself():
    # GIVEN a space of three configurations
    space, sampler = (
        Space(max_workers=1, prefetch_factors=(1, 2)),
        optuna.samplers.TPESampler(seed=0),
    )
    found, _ = search_on(FAST_STEP, sampler=sampler, own=None, space=space, budget_s=1000.0)
    assert found.study.sampler == sampler
    assert len({*configs(found)[-MOST_REPEATS - 1 :]}) <= 3
    assert len(configs(found)) < 60
    # AND then what it has found takes turns, as trials of the study, too
    assert len(found.belief.rounds) >= 2
    assert {c for each in found.belief.rounds for c in each.rates} <= {*configs(found)}


GRID, RANDOM = (
    optuna.samplers.GridSampler({"num_workers": [0, 2, 4]}),
    optuna.samplers.RandomSampler(seed=0),
)


@pytest.mark.parametrize("sampler", [GRID, RANDOM])
def test_another_sampler_leaves_time_for_rounds_and_may_know_workers_alone(sampler):
    found, clock = search_on(FAST_STEP, sampler=sampler, own=None, budget_s=10.0)
    assert {config.num_workers for config in configs(found)} >= (
        {0, 2, 4} if sampler is GRID else set()
    )
    assert all(trial.measurement for trial in found.trials)
    assert found.belief.rounds
    assert clock() <= 12


def test_bursts_of_slow_batches_last_some_turns_of_the_workers():
    found, _ = search_on(SimulatedMachine(cpu_s=0.5), budget_s=20.0)
    assert max(each.measurement.window_s for each in found.trials) > 2.0


NO_CEILING = SimulatedMachine(step_s=0.005, noise_sd=0.03)
TWO_KEEP_UP = SimulatedMachine(cpu_s=0.01, step_s=0.03)


@pytest.mark.parametrize(
    ("machine", "budget_s"), [(TWO_KEEP_UP, 60.0), (NO_CEILING, 8.0), (NO_CEILING, 60.0)]
)
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
    assert (
        pruned.keys()
        == {each.number for each in searched(found) if each.failure is not None}
        != set()
    )
    assert all(
        "the driver said no" in each.user_attrs["autotune_loader"] for each in pruned.values()
    )
    assert found.study.best_params["num_workers"] <= 3
    # AND none of them is proposed again, and Optuna says nothing, as chatty as it is otherwise
    assert len(configs(found)) == len({*configs(found)})
    assert (before, capfd.readouterr()) == (optuna.logging.get_verbosity(), ("", ""))


@pytest.mark.parametrize("kind", ["oom_killed", "deadline"])
@pytest.mark.parametrize(
    ("cores", "own", "safe"), [(2, LoaderConfig(num_workers=8), 3), (16, None, 2)]
)
def test_where_workers_are_killed_or_hang_the_most_that_are_safe_are_found(kind, cores, own, safe):
    # GIVEN a job for which every worker helps, on a machine where few can be had, perhaps fewer than the user's
    machine = SimulatedMachine(
        cores=cores, cpu_s=0.01, wait_s=0.02, step_s=0.001, fails=failing(kind, beyond=safe)
    )
    found, clock = search_on(machine, own=own, probe=Hanging)
    assert assembled(found, clock()).best.num_workers == safe
    assert clock() <= 62


def test_a_failure_that_may_pass_is_tried_once_more():
    answers = [Failure(kind="crashed", phase="start", message="chance", retryable=True)]
    machine = replace(
        FAST_STEP, fails=lambda config: answers.pop() if config == TWO and answers else None
    )
    found, _ = search_on(machine, budget_s=3.0)
    assert not answers
    assert all(trial.measurement for trial in found.trials)


@pytest.mark.parametrize("own", [None, TWO])
def test_with_one_legal_configuration_the_search_ends(own):
    found, clock = search_on(FAST_STEP, own=own, space=Space(max_workers=0), budget_s=5.0)
    assert clock() <= 6
    assert assembled(found, clock()).status == "complete"


def test_what_an_earlier_run_was_allowed_is_not_chosen_by_one_that_is_not():
    wide, study = Space(in_order=(True, False)), open_study()
    before = len(search_on(FAST_STEP, space=wide, study=study, budget_s=8.0)[0].trials)
    odd = LoaderConfig(num_workers=5, prefetch_factor=8, in_order=False)
    found, clock = search_on(
        FAST_STEP, space=Space(max_workers=2), study=study, suggestions=[odd], budget_s=8.0
    )
    best = assembled(found, clock()).best
    assert (best.in_order, best.num_workers <= 2) == (True, True)
    assert odd not in [trial.config for trial in found.trials[before:]]


@pytest.mark.parametrize(("copy_s", "is_pinned"), [(0.02, True), (0.001, False)])
def test_what_can_be_handed_over_decides_whether_batches_are_pinned(copy_s, is_pinned):
    machine = SimulatedMachine(
        cores=8, cpu_s=0.02, step_s=0.004, pin_s=0.008, copy_s=copy_s, batch_bytes=30_000_000
    )
    found, clock = search_on(machine, own=LoaderConfig(), budget_s=20.0)
    with_some = [config for config in configs(found) if config.num_workers]
    assert {config.pin_memory for config in with_some} == {is_pinned}
    # THEN nothing trains faster than batches that lie ready
    result = assembled(found, clock())
    assert result.rate.value <= 1.1 * result.transfer_ceiling.value
    assert result.transfer_ceiling.value < result.ceiling.value


def test_where_pinning_is_decided_the_users_own_loader_stays_as_it_is():
    machine = SimulatedMachine(
        cores=8, cpu_s=0.02, step_s=0.004, pin_s=0.008, copy_s=0.02, batch_bytes=30_000_000
    )
    found, _ = search_on(machine, own=TWO, budget_s=20.0)
    assert {
        config.pin_memory for config in configs(found) if config.num_workers and config != TWO
    } == {True}
    assert TWO in configs(found)
    assert found.run.space.config(
        {"num_workers": 2, "prefetch_factor": 2, "pin_memory": True}
    ).pin_memory


@pytest.mark.parametrize("seed", range(6))
def test_a_search_does_not_end_while_its_choice_may_lose_more_than_the_tolerance(seed):
    machine, clock = (
        SimulatedMachine(cores=16, cpu_s=0.05, step_s=0.002, noise_sd=0.12),
        FakeClock(),
    )
    found = simulated_search(
        SimulatedProbe(machine, clock, seed=seed), simulated_run(machine), clock
    )
    assert (
        found.ended in (Ended.BUDGET, Ended.ROUNDS)
        or found.belief.loss(found.belief.choice) <= 0.02
    )


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
    # AND where nothing worked, torch's defaults, with the error
    assert any(
        Caution.FAILED.said_by(each) and "no more" in each.sentence for each in result.warnings
    )
    assert Ended.FALLBACK.said_by(result.ended) == (result.status == "fallback")
    assert after or (result.status, result.best, result.rate) == ("fallback", NONE, None)


# What is chosen

SAFE, NO_TIME, EXPECTED = Ended.SAFE, Ended.BUDGET, Ended.EXPECTED
SHAPE = replace(
    simulated_trials(SimulatedMachine(), TWO)[0].measurement,
    traces=(),
    samples=0,
    step_s=0.0,
    service_s=0.0,
)


def a_search(rounds, ended, *, searched=(1.0, 1.0), foreign=0.0):
    """A search whose bursts gave the user's own configuration and another one these rates; it knows nothing else."""
    trials = []
    for number, rates in [(None, searched), *enumerate(rounds)]:
        for config, rate in zip((NONE, TWO), rates, strict=True):
            told = Interval(value=rate or 0.0, low=rate or 0.0, high=rate or 0.0, count=9)
            measured = replace(SHAPE, samples_per_s=told, foreign_cpu_share=foreign)
            trials += [Trial.of(len(trials), config, measured, round=number)] if rate else []
    belief = Belief(Space(max_workers=0, also=(TWO,)), Context(usable_cores=2), trials)
    return SimpleNamespace(
        trials=trials,
        belief=belief,
        run=SimpleNamespace(tolerance=0.02, baseline=NONE),
        ended=ended,
    )


FASTER, ALIKE = [(100.0, 200.0), (100.0, 190.0)], [(100.0, 110.0), (100.0, 90.0)]


@pytest.mark.parametrize(
    ("search", "why", "best"),
    [
        (a_search(FASTER, SAFE), None, TWO),
        # undecided, and it is almost certainly faster
        (a_search(FASTER, NO_TIME, foreign=0.5), Undecided.BUSY, TWO),
        (a_search(FASTER[:1], NO_TIME, searched=(100.0, 200.0)), Undecided.FEW_ROUNDS, TWO),
        (a_search([], NO_TIME, searched=(100.0, 400.0)), Undecided.NO_ROUNDS, TWO),
        # undecided, and it may not be: the user's own
        (a_search(ALIKE, NO_TIME), Undecided.CLOSE, NONE),
        (
            a_search([(100.0, 180.0), (100.0, 40.0)], NO_TIME, searched=(None, 300.0), foreign=0.5),
            Undecided.BUSY,
            NONE,
        ),
        (a_search(ALIKE, EXPECTED), Undecided.TOO_NOISY, NONE),
        (a_search(ALIKE, NO_TIME, foreign=0.5), Undecided.BUSY, NONE),
        (a_search([(100.0, 101.0)], NO_TIME, searched=(100.0, 99.0)), Undecided.FEW_ROUNDS, NONE),
        (a_search([], NO_TIME, searched=(100.0, 101.0)), Undecided.NO_ROUNDS, NONE),
        (a_search([], NO_TIME, searched=(100.0, None)), Undecided.ONE_TRIED, NONE),
        # interrupted: the best so far, and nothing that never ran, whatever is believed of it
        (a_search([], Ended.INTERRUPTED, searched=(100.0, 400.0)), None, TWO),
        (a_search([], Ended.INTERRUPTED, searched=(100.0, None)), None, NONE),
    ],
)
def test_a_guess_is_the_users_own_unless_something_is_almost_certainly_faster(search, why, best):
    chosen, found = choice_of(search)
    assert (chosen, found and found.kind) == (best, why and why.kind)


def test_what_is_told_of_the_best_is_of_its_rounds_alone():
    found = simulated_result(SimulatedMachine(step_s=0.005), own=with_workers(1), budget_s=20.0)
    rates = found.rates_of(found.best)
    assert found.status == "complete"
    assert len(rates) >= 2
    assert min(rates.values()) <= found.rate.value <= max(rates.values())
    assert found.speedup.low < found.rate.value / found.baseline_rate.value < found.speedup.high
    assert None not in (found.ceiling, found.tuned_at)
    assert found.step_s == pytest.approx(0.005, rel=0.2)


PINS = {"pin_s": 0.018, "copy_s": 0.02, "cores": 16, "cpu_s": 0.1, "batch_bytes": 38_500_000}
PINNING_BINDS, STEP_BINDS = {**PINS, "step_s": 0.0097, "receive_s": 0.008}, {**PINS, "step_s": 0.03}


@pytest.mark.parametrize(
    ("machine", "binds", "handed_s"),
    [(PINNING_BINDS, "transfer", 0.018), (STEP_BINDS, "step", 0.03)],
)
def test_what_workers_hand_over_at_most_tells_whether_that_or_the_step_binds(
    machine, binds, handed_s
):
    found = simulated_result(SimulatedMachine(**machine))
    assert found.bottleneck.kind == binds
    assert 32 / found.transfer_ceiling.value == pytest.approx(handed_s, rel=0.05)


@pytest.mark.parametrize(("epoch_batches", "told"), [(20, True), (10_000, False)])
def test_a_choice_by_whole_epochs_says_so(epoch_batches, told):
    found = simulated_result(SimulatedMachine(worker_start_s=0.2), epoch_batches=epoch_batches)
    assert any(Caution.EPOCH_STARTS.said_by(each) for each in found.warnings) == told


@pytest.mark.parametrize(
    ("epoch_batches", "may_keep", "own", "is_kept", "is_said"),
    [
        (20, True, TWO, True, True),
        (10_000, True, TWO, False, False),
        (20, False, TWO, False, False),
        (20, True, None, True, True),
    ],
)
def test_workers_are_kept_where_their_start_takes_much_of_an_epoch_and_then_it_is_said(
    epoch_batches, may_keep, own, is_kept, is_said
):
    clock, machine = FakeClock(), SimulatedMachine(worker_start_s=0.2)
    run = replace(
        simulated_run(machine, own=own, epoch_batches=epoch_batches), may_keep_workers=may_keep
    )
    found = simulated_search(
        SimulatedProbe(machine, clock, epoch_batches=epoch_batches), run, clock
    )
    result = assembled(found, clock())
    assert (result.best.num_workers > 0, result.best.persistent_workers) == (True, is_kept)
    assert (
        any("persistent workers do not see" in each.sentence for each in result.warnings) == is_said
    )
    # AND what is written is what was measured, in rounds
    assert len(result.rates_of(result.best)) >= 2
    # AND the user's own stays as it is
    assert own is None or own in {trial.config for trial in result.trials}


class Spawned(SimulatedProbe):
    """Tells the start of workers where it was one of training."""

    def burst(self, config, plan):
        found = super().burst(config, plan)
        self.anew = [
            *getattr(self, "anew", []),
            *([config.num_workers] if plan.anew and config.num_workers else []),
        ]
        return found if plan.anew else replace(found, first_batch_s=None)


@pytest.mark.parametrize(
    ("epoch_batches", "persistent", "is_once"),
    [(100_000, False, True), (20, True, True), (20, False, False), (None, False, True)],
)
def test_workers_start_as_in_training_once_and_where_that_counts(
    epoch_batches, persistent, is_once
):
    clock, machine = FakeClock(), SimulatedMachine(worker_start_s=0.2)
    run = simulated_run(machine, own=TWO, epoch_batches=epoch_batches)
    probe = Spawned(machine, clock, epoch_batches=epoch_batches)
    found = simulated_search(
        probe, replace(run, space=replace(run.space, persistent_workers=persistent)), clock
    )
    numbers = list(
        dict.fromkeys(
            trial.config.num_workers for trial in found.trials if trial.config.num_workers
        )
    )
    assert probe.anew == numbers[: 1 if is_once else None]
    assert is_once or len(numbers) > 1


@pytest.mark.parametrize(("method", "most_s"), [("fork", 0.75), ("spawn", 0.4)])
def test_queues_are_filled_before_a_round_without_waiting_for_a_start_that_is_not(method, most_s):
    # GIVEN workers that were enough, whose start took 3 s
    machine, clock, plans = SimulatedMachine(cores=2, cpu_s=0.01, step_s=0.03), FakeClock(), []
    config = with_workers(3, 8, multiprocessing_context=method)
    [trial] = simulated_trials(machine, config)
    trial = replace(trial, measurement=replace(trial.measurement, first_batch_s=3.0))
    probe = SimpleNamespace(burst=lambda config, plan: plans.append(plan) or trial.measurement)
    bursts = Bursts(
        probe, Context(usable_cores=2, step_cores=1.0), Budget(60.0, clock), lambda: [trial], 0.02
    )
    bursts.run(config, 1, 0)
    least_s = min(CLONED_S + 8 * trial.measurement.service_s, most_s)
    assert least_s <= plans[0].prefill_s <= most_s


DEADLINES = {
    # start method, workers, first batch, start of a process, budget: seconds at least and at most
    "a fast batch": ("fork", 2, 0.022, 2.0, 20.0, (5.0, 20.0 / 3)),
    "a long budget": ("fork", 2, 0.022, 2.0, 600.0, (5.0, 10.0)),
    "many workers": ("fork", 64, 0.022, 2.0, 600.0, (30.0, 60.0)),
    "a slow batch": ("fork", 2, 22.0, 2.0, 20.0, (88.0, 100.0)),
    "a slow import": ("spawn", 2, 0.022, 10.0, 60.0, (20.0, 25.0)),
    "clones": ("forkserver", 8, 0.022, 3.0, 30.0, (10.0, 12.0)),
}


@pytest.mark.parametrize("case", DEADLINES.values(), ids=DEADLINES)
def test_a_hang_is_told_from_a_slow_start_within_a_third_of_the_budget(case):
    method, workers, first_batch_s, start_s, budget_s, (least_s, most_s) = case
    plans, failure = [], Failure(kind="deadline", phase="start", message="no")
    probe = SimpleNamespace(burst=lambda config, plan: plans.append(plan) or failure)
    context = Context(usable_cores=2, start_s=start_s)
    bursts = Bursts(probe, context, Budget(budget_s, FakeClock()), list, first_batch_s)
    bursts.run(with_workers(workers, multiprocessing_context=method), 0)
    assert least_s <= plans[0].deadline_s <= most_s


@pytest.mark.parametrize(
    ("wait_s", "read_bytes", "is_same"),
    [(0.0, 0, True), (0.0, 4096, False), (0.04, 0, False)],
    ids=["in memory", "from a disk", "from what does not count"],
)
def test_sides_of_a_round_read_the_same_where_none_reads_it_for_the_other(
    wait_s, read_bytes, is_same
):
    places = []

    class Reading(SimulatedProbe):
        def burst(self, config, plan):
            places.append(plan.place)
            return replace(super().burst(config, plan), read_bytes=read_bytes)

    found, _ = search_on(SimulatedMachine(cpu_s=0.01, wait_s=wait_s), probe=Reading)
    rounds = [trial.round for trial in found.trials]
    assert len({*rounds}) > 2
    assert places == (rounds if is_same else [None] * len(rounds))


class PerBatch(SimulatedProbe):
    """A step that takes as long for every batch; samples cost the workers the same."""

    def burst(self, config, plan):
        size = config.batch_size or 32
        self.machine = replace(self.machine, batch_size=size, cpu_s=0.005 * size / 32)
        return super().burst(replace(config, batch_size=None), plan)


def test_a_batch_size_is_chosen_where_it_gains_and_was_allowed():
    space = Space(max_workers=4, batch_size=(None, 64, 128, 16))
    found = assembled(search_on(SimulatedMachine(), own=None, probe=PerBatch, space=space)[0], 1.0)
    assert found.best.batch_size == found.batch_size
    assert found.batch_size in {64, 128}
    assert any(Caution.BATCH_SIZE.said_by(each) for each in found.warnings)


@pytest.mark.parametrize(
    ("sample", "samples", "fits", "told"),
    [
        (None, 10, True, None),
        (0.0, 10, True, Source.NOT_STORAGE()),
        (1e5, None, True, Source.STORAGE(sample=1e5)),
        (1e5, 10, None, Source.STORAGE(sample=1e5)),
        (1e5, 10, True, Source.STORAGE_AT_FIRST(sample=1e5, data=10**6)),
        (1e5, 10, False, Source.STORAGE_ALWAYS(sample=1e5, data=10**6, memory=1 << 30)),
    ],
)
def test_where_samples_came_from_is_told_and_where_training_will_have_them_from(
    sample, samples, fits, told
):
    machine = SimpleNamespace(memory=SimpleNamespace(total_bytes=1 << 30), holds=lambda size: fits)
    measured = SimpleNamespace(read_bytes_per_sample=sample)
    data = SimpleNamespace(samples_per_epoch=lambda: samples)
    assert source_of(measured, data, machine) == told
