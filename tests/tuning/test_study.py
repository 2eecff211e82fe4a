"""The study of a run on simulated machines: who proposes, why it ends, what is chosen."""

import functools
import os
import pickle
import stat
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import optuna
import pytest

from autotune_loader.diagnosis import Caution, Ended, Undecided
from autotune_loader.search.belief import Belief
from autotune_loader.search.sampler import ROUND, TwinSampler
from autotune_loader.search.space import BatchCost, Context, Limits, Space
from autotune_loader.tuning import run as job
from autotune_loader.tuning.assemble import assembled, choice_of
from autotune_loader.tuning.bursting import CLONED_S, ROUND_BURST, Budget, Bursts
from autotune_loader.tuning.study import MOST_REPEATS, open_study
from autotune_loader.values import Failure, Interval, LoaderConfig, Trial
from autotune_loader.values.units import counted
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_result,
    simulated_trials,
    with_workers,
)
from tests.support.tuned import simulated_run, simulated_search

DECIDED = (Ended.SAFE, Ended.CEILING, Ended.EXPECTED)
NONE, TWO = LoaderConfig(), with_workers(2)
FAST_STEP = SimulatedMachine(step_s=0.001)
RANDOM = optuna.samplers.RandomSampler(seed=0)


def search_on(machine, *, own=TWO, probe=SimulatedProbe, space=None, known=(), **given):
    """The search, and what it was when it ended; `known` are fields of the `WarmupReport`."""
    clock = FakeClock()
    run = simulated_run(machine, space, own=own, **dict(known))
    return simulated_search(probe(machine, clock), run, clock, **given), clock


def searched(found):
    """What ran alone."""
    return [trial for trial in found.trials if trial.round is None]


def configs(found):
    return [trial.config for trial in searched(found)]


def test_the_study_holds_every_burst():
    told = Mock()
    found, _ = search_on(FAST_STEP, progress=told)
    result, trials, study = assembled(found, 1.0), found.trials, found.study
    # THEN the user's own comes first, and parameters are those of what ran, none is clipped
    assert trials[0].config == TWO
    assert [each.params["num_workers"] for each in study.trials] == [
        each.config.num_workers for each in trials
    ]
    assert [each.user_attrs.get(ROUND) for each in study.trials] == [each.round for each in trials]
    best = max(trials, key=lambda each: each.samples_per_s or 0.0)
    assert study.best_params == found.run.space.params(best.config)
    assert study.best_value == best.samples_per_s
    # AND the sampler that proposed is the study's, and pickled it is whole
    assert type(study.sampler) is TwinSampler
    assert result.study is study
    assert " that ran " not in result.ended.sentence
    assert len(pickle.loads(pickle.dumps(study)).trials) == len(trials)
    # AND progress heard of everything
    assert [call.args[0] for call in told.trial.call_args_list] == trials
    rounds = found.belief.rounds
    assert [call.args[0] for call in told.round.call_args_list] == [*range(1, len(rounds) + 1)]
    # AND the choice ran in two rounds
    assert sum(result.best in each.rates for each in rounds) >= 2


@pytest.mark.parametrize("storage", ["new/folder/study.journal", "sqlite:///study.db"])
def test_a_kept_study_is_continued_and_shared(storage, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(functools.partial(os.umask, os.umask(0)))
    # GIVEN a search that was told to end after some trials, and another process that runs one more
    theirs = open_study(storage)
    before, _ = search_on(FAST_STEP, study=theirs, budget_s=3.0)
    first, theirs.sampler = searched(before), before.twin
    before.twin.seconds_left = None
    running = Space(also=(TWO,)).suggest(theirs.ask())
    assert len(first) >= 2
    assert running not in configs(before)
    for path in tmp_path.rglob("*.journal"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # WHEN the same job is tuned with the same storage
    found, _ = search_on(FAST_STEP, study=open_study(storage), budget_s=4.0)
    # THEN what was measured is known, and none of it is searched again
    known = searched(found)[: len(first)]
    assert found.belief.twin is not None
    assert [each.config for each in known] == [each.config for each in first]
    assert [each.samples_per_s for each in known] == [each.samples_per_s for each in first]
    assert len(configs(found)) == len({*configs(found)})
    assert len(found.trials) > len(first)
    # AND the trial of the other process is left to it
    assert running not in configs(found)
    assert [each.state.name for each in theirs.get_trials()].count("RUNNING") == 1


JOBS = {
    "another batch size": (replace(FAST_STEP, batch_size=64), {}, "another job .*batches of 32"),
    "another number of cores": (replace(FAST_STEP, cores=8), {}, "another job .*4 cores"),
    "another CPU": (FAST_STEP, {}, "another job"),
    "another GPU": (FAST_STEP, {"device_name": "H100"}, "another job"),
    "batches three times as large": (FAST_STEP, {"batch_bytes": 3 << 20}, "batches of 1,048,576"),
    "batches a quarter as large": (FAST_STEP, {"batch_bytes": 1 << 18}, "batches of 1,048,576"),
    "batches that are padded": (FAST_STEP, {"batch_bytes": 3 << 19}, None),
}


@pytest.mark.parametrize("case", JOBS)
def test_trials_of_another_job_or_machine_are_refused(case, monkeypatch):
    (machine, known, words), study = JOBS[case], open_study()
    search_on(FAST_STEP, study=study, budget_s=1.0)
    if case == "another CPU":
        monkeypatch.setattr(job, "cpu_model", lambda: "another CPU")
    if words is None:
        search_on(machine, known=known, study=study, budget_s=1.0)
        study = open_study()
        for _ in range(2):  # batches whose size nobody knows
            search_on(machine, known={"batch_bytes": 0}, study=study, budget_s=1.0)
        return
    with pytest.raises(ValueError, match=f"{words}.*. Try a separate study for each job."):
        search_on(machine, known=known, study=study)


@pytest.mark.parametrize(
    "storage",
    ["nodb://me:fish@host/db", "postgresql+nodriver://me:rd@fish@host/db", "/dev/null/x.journal"],
)  # fmt: skip
def test_a_storage_is_refused_without_its_password(storage):
    says = r"cannot be opened \(\w+\). Try storage='study.journal'."
    with pytest.raises(ValueError, match=says) as caught:
        open_study(storage)
    assert "fish" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_second_run_asks_whether_its_rounds_hold():
    study = open_study()
    found, _ = search_on(FAST_STEP, study=study)
    before, choice = len(found.trials), found.belief.choice
    assert found.ended in DECIDED
    assert choice != TWO
    # WHEN nothing has changed THEN one round says so, with the choice, its rival and the user's own
    found, _ = search_on(FAST_STEP, study=study)
    new = [trial for trial in found.trials if trial.number >= before]
    assert [trial.round for trial in new][:3] == [before] * 3
    assert {choice.key(), TWO} <= {trial.config.key() for trial in new[:3]}
    # WHEN workers gain nothing any more THEN all rounds before count as one, and others follow
    again, gains_nothing = len(found.trials), replace(FAST_STEP, cpu_s=0.0001, receive_s=0.03)
    found, _ = search_on(gains_nothing, study=study)
    assert len({trial.round for trial in found.trials[:again]} - {None}) == 1
    assert len(found.belief.rounds) >= 2


METHODS = (
    *("create_new_trial", "set_trial_param", "set_trial_user_attr", "get_all_trials"),
    "set_trial_state_values",
)


def gone(name):
    works = getattr(optuna.storages.InMemoryStorage, name)

    def method(self, *given, **named):
        self.trials_left -= name == "create_new_trial"
        if name == self.breaks and self.trials_left <= 0:
            raise OSError("database is locked")
        return works(self, *given, **named)

    return method


Lost = type("Lost", (optuna.storages.InMemoryStorage,), {name: gone(name) for name in METHODS})
"""A database that is gone after so many trials, while one of these methods is called."""


@pytest.mark.parametrize(
    ("method", "sampler"),
    [*((each, None) for each in METHODS), *((each, RANDOM) for each in METHODS[:2])],
)  # fmt: skip
def test_a_storage_that_fails_costs_a_warning(method, sampler):
    storage = Lost()
    storage.trials_left, storage.breaks = 6, method
    study = optuna.create_study(direction="maximize", storage=storage)
    before = study.sampler
    found, clock = search_on(FAST_STEP, study=study, sampler=sampler, budget_s=10.0)
    result, lost = assembled(found, clock()), "failed (OSError): the search went on in memory"
    assert any(lost in each.sentence for each in result.warnings)
    assert result.rate is not None
    assert study.sampler is before
    # THEN no burst is lost: what ran before is known, and in the study of the result
    assert len([trial for trial in found.trials if trial.measurement and trial.number < 5]) == 5
    assert result.study is not study
    done = [each.value for each in result.study.trials if each.state.name == "COMPLETE"]
    assert done == [each.samples_per_s for each in found.trials if each.measurement]


def test_another_error_of_a_trial_is_raised():
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
    assert found.study.sampler is sampler
    assert " that ran " in assembled(found, 1.0).ended.sentence
    # THEN it ends with so many that are known, of which none is one too many
    ran = configs(found)
    last_new = max(place for place, config in enumerate(ran) if config not in ran[:place])
    assert len(ran) == last_new + 1 + MOST_REPEATS
    # AND then what it has found takes turns, as trials of the study, too
    assert len(found.belief.rounds) >= 2
    assert {config for each in found.belief.rounds for config in each.rates} <= {*ran}


@pytest.mark.parametrize("values", [[0, 2, 4], None], ids=["of workers alone", "of everything"])
def test_another_sampler_leaves_time_for_rounds(values):
    sampler = optuna.samplers.RandomSampler(seed=0)
    if values is not None:
        sampler = optuna.samplers.GridSampler({"num_workers": values})
    found, clock = search_on(FAST_STEP, sampler=sampler, own=None, budget_s=20.0)
    assert {*(values or ())} <= {config.num_workers for config in configs(found)}
    assert all(trial.measurement for trial in found.trials)
    assert found.belief.rounds
    assert clock() <= 22


NO_CEILING = SimulatedMachine(step_s=0.005, noise_sd=0.03)
TWO_KEEP_UP = SimulatedMachine(cpu_s=0.01, step_s=0.03)


CPU_KEEPS_UP = replace(TWO_KEEP_UP, step_cores=1.0)
ENDS = [
    (TWO_KEEP_UP, 60.0, "as DataLoader can transfer batches."),
    (CPU_KEEPS_UP, 60.0, "as the step alone."),
    (NO_CEILING, 8.0, ""),
    (NO_CEILING, 60.0, ""),
]


@pytest.mark.parametrize(("machine", "budget_s", "ceiling"), ENDS)
def test_a_search_ends_at_ceiling_or_in_time(machine, budget_s, ceiling):
    found, clock = search_on(machine, budget_s=budget_s)
    if ceiling:
        assert found.ended is Ended.CEILING
        assert assembled(found, 1.0).ended.sentence.endswith(ceiling)
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


def test_failures_are_pruned_in_silence(capfd):
    before = optuna.logging.get_verbosity()
    found, _ = search_on(replace(FAST_STEP, fails=failing("crashed", beyond=3)))
    pruned = {each.number: each for each in found.study.trials if each.state.name == "PRUNED"}
    assert pruned
    assert pruned.keys() == {each.number for each in searched(found) if each.failure is not None}
    for each in pruned.values():
        assert "the driver said no" in each.user_attrs["autotune_loader"]
    assert found.study.best_params["num_workers"] <= 3
    # AND none of them is proposed again, and Optuna says nothing, as chatty as it is otherwise
    assert len(configs(found)) == len({*configs(found)})
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before


@pytest.mark.parametrize("kind", ["oom_killed", "deadline"])
@pytest.mark.parametrize(("cores", "own", "safe"), [(2, with_workers(8), 3), (16, None, 2)])
def test_where_workers_die_the_most_safe_are_found(kind, cores, own, safe):
    # GIVEN a job for which every worker helps, where few can be had, perhaps fewer than the user's
    machine = SimulatedMachine(
        cores=cores, cpu_s=0.01, wait_s=0.02, step_s=0.001, fails=failing(kind, beyond=safe)
    )
    found, clock = search_on(machine, own=own, probe=Hanging)
    assert assembled(found, clock()).best.num_workers == safe
    assert clock() <= 62


def test_a_failure_that_may_pass_is_tried_again():
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


def test_what_only_an_earlier_run_allowed_is_left():
    wide, study = Space(in_order=(True, False)), open_study()
    before = len(search_on(FAST_STEP, space=wide, study=study, budget_s=8.0)[0].trials)
    odd = LoaderConfig(num_workers=5, prefetch_factor=8, in_order=False)
    narrow = {"space": Space(max_workers=2), "suggestions": [odd]}
    found, clock = search_on(FAST_STEP, study=study, budget_s=8.0, **narrow)
    best = assembled(found, clock()).best
    assert best.in_order
    assert best.num_workers <= 2
    assert odd not in [trial.config for trial in found.trials[before:]]


@pytest.mark.parametrize(
    ("copy_s", "budget_s", "is_pinned"),
    [(0.02, 15.0, True), (0.001, 10.0, False), (0.001, 9.9, True)],  # or where time is short
)
def test_batches_are_pinned_where_that_hands_over_more(copy_s, budget_s, is_pinned):
    machine = SimulatedMachine(
        cores=8, cpu_s=0.02, step_s=0.004, pin_s=0.008, copy_s=copy_s, batch_bytes=30_000_000
    )
    found, clock = search_on(machine, own=TWO, budget_s=budget_s)
    others = [config for config in configs(found) if config.num_workers and config != TWO]
    assert {config.pin_memory for config in others} == {is_pinned}
    result = assembled(found, clock())
    if budget_s < 10.0:
        assert result.transfer_ceiling is None
    else:
        assert result.transfer_ceiling.value < result.ceiling.value
    # AND the user's own, which does not pin, stays as it is
    assert TWO in configs(found)
    pinned = {"num_workers": 2, "prefetch_factor": 2, "pin_memory": True}
    assert found.run.space.config(pinned).pin_memory == is_pinned


@pytest.mark.parametrize("seed", range(2))
def test_no_search_ends_while_its_choice_loses_much(seed):
    machine = SimulatedMachine(cores=16, cpu_s=0.05, step_s=0.002, noise_sd=0.12)
    probe = functools.partial(SimulatedProbe, seed=seed)
    found, _ = search_on(machine, own=None, probe=probe, budget_s=40.0)
    assert found.ended is Ended.BUDGET or found.belief.loss(found.belief.choice) <= 0.02


@pytest.mark.parametrize(
    ("kind", "after"), [("crashed", 0), ("crashed", 5), ("deadline", 0), ("deadline", 2)]
)
def test_where_everything_fails_the_search_has_a_result(kind, after):
    answers, broken = [None] * after, Failure(kind=kind, phase="batches", message="no more")
    machine = replace(FAST_STEP, fails=lambda config: answers.pop() if answers else broken)
    found, clock = search_on(machine, probe=Hanging, budget_s=30.0)
    result = assembled(found, clock())
    assert len(found.trials) < after + 12
    assert clock() < 30.0 + 2 * 20.0
    [failed] = [each.sentence for each in result.warnings if Caution.FAILED.said_by(each)]
    assert failed.startswith(counted(sum(t.failure is not None for t in found.trials), "trial"))
    assert "no more" in failed
    assert Ended.FALLBACK.said_by(result.ended) == (result.status == "fallback")
    # AND where nothing worked, torch's defaults
    if not after:
        assert result.status == "fallback"
        assert result.best == NONE
        assert result.rate is None


# What is chosen

SAFE, NO_TIME, EXPECTED = Ended.SAFE, Ended.BUDGET, Ended.EXPECTED
SHAPE = simulated_trials(SimulatedMachine(), TWO)[0].measurement
SHAPE = replace(SHAPE, traces=(), samples=0, step_s=0.0, service_s=0.0)


def a_search(rounds, ended, *, searched=(1.0, 1.0), foreign=0.0, also=(TWO,)):
    """A search whose bursts gave the user's own configuration and another one these rates."""
    trials = []
    for number, rates in [(None, searched), *enumerate(rounds)]:
        for config, rate in zip((NONE, TWO), rates, strict=True):
            told = Interval(value=rate or 0.0, low=rate or 0.0, high=rate or 0.0, count=9)
            measured = replace(SHAPE, samples_per_s=told, foreign_cpu_share=foreign)
            trials += [Trial.of(len(trials), config, measured, round=number)] if rate else []
    belief = Belief(Space(max_workers=0, also=also), Context(usable_cores=2), trials)
    run = SimpleNamespace(tolerance=0.02, baseline=NONE)
    return SimpleNamespace(trials=trials, belief=belief, run=run, ended=ended)


FASTER, ALIKE, TORN = [(100, 200), (100, 190)], [(100, 110), (100, 90)], [(100, 180), (100, 40)]
CHOICES = [
    (a_search(FASTER, SAFE), None, TWO),
    # undecided, and it is almost certainly faster
    (a_search(FASTER, NO_TIME, foreign=0.5), Undecided.BUSY, TWO),
    (a_search(FASTER[:1], NO_TIME, searched=(100, 200)), Undecided.FEW_ROUNDS, TWO),
    (a_search([], NO_TIME, searched=(100, 400)), Undecided.NO_ROUNDS, TWO),
    # undecided, and it may not be: the user's own
    (a_search(ALIKE, NO_TIME), Undecided.CLOSE, NONE),
    (a_search(TORN, NO_TIME, searched=(None, 300), foreign=0.5), Undecided.BUSY, NONE),
    (a_search(ALIKE, EXPECTED), Undecided.TOO_NOISY, NONE),
    (a_search(ALIKE, NO_TIME, foreign=0.5), Undecided.BUSY, NONE),
    (a_search([(100, 101)], NO_TIME, searched=(100, 99)), Undecided.FEW_ROUNDS, NONE),
    (a_search([], NO_TIME, searched=(100, 101)), Undecided.NO_ROUNDS, NONE),
    (a_search([], NO_TIME, searched=(100, None)), Undecided.ONE_TRIED, NONE),
    # others are busy, but there is nothing to choose from
    (a_search([(9, None)] * 2, SAFE, searched=(9, None), foreign=0.5, also=()), None, NONE),
    # interrupted: the best so far, and nothing that never ran, whatever is believed of it
    (a_search([], Ended.INTERRUPTED, searched=(100, 400)), None, TWO),
    (a_search([], Ended.INTERRUPTED, searched=(100, None)), None, NONE),
]


@pytest.mark.parametrize(("search", "why", "best"), CHOICES)
def test_a_guess_is_usually_the_users_own(search, why, best):
    chosen, found = choice_of(search)
    assert chosen == best
    assert (found and found.kind) == (why and why.kind)


def test_what_is_told_is_of_rounds_alone():
    found = simulated_result(SimulatedMachine(step_s=0.005), own=with_workers(1), budget_s=20.0)
    rates = found.rates_of(found.best)
    assert found.status == "complete"
    assert len(rates) >= 2
    assert min(rates.values()) <= found.rate.value <= max(rates.values())
    assert found.speedup.low < found.rate.value / found.baseline_rate.value < found.speedup.high
    assert found.step_s == pytest.approx(0.005, rel=0.2)


PINS = {"pin_s": 0.018, "copy_s": 0.02, "cores": 16, "cpu_s": 0.1, "batch_bytes": 38_500_000}
PINNING_BINDS, STEP_BINDS = {**PINS, "step_s": 0.0097, "receive_s": 0.008}, {**PINS, "step_s": 0.03}


@pytest.mark.parametrize(
    ("machine", "binds", "handed_s"),
    [(PINNING_BINDS, "transfer", 0.018), (STEP_BINDS, "step", 0.03)],
)
def test_handing_over_tells_what_binds(machine, binds, handed_s):
    found = simulated_result(SimulatedMachine(**machine))
    assert found.bottleneck.kind == binds
    assert 32 / found.transfer_ceiling.value == pytest.approx(handed_s, rel=0.05)


STARTS_SLOWLY = SimulatedMachine(worker_start_s=0.2)


def search_of_epochs(epoch_batches, *, own=TWO, probe=SimulatedProbe, may_keep=False, **space):
    clock = FakeClock()
    run = simulated_run(STARTS_SLOWLY, own=own, epoch_batches=epoch_batches)
    run = replace(run, may_keep_workers=may_keep, space=replace(run.space, **space))
    probe = probe(STARTS_SLOWLY, clock, epoch_batches=epoch_batches)
    return simulated_search(probe, run, clock, budget_s=20.0), probe


@pytest.mark.parametrize(
    ("epoch_batches", "may_keep", "own", "is_kept", "starts_count"),
    [
        (20, True, TWO, True, True),  # those of the user's own
        (20, True, None, True, False),
        (20, False, TWO, False, True),
        (10_000, True, TWO, False, False),
    ],
)
def test_workers_are_kept_where_their_start_counts(
    epoch_batches, may_keep, own, is_kept, starts_count
):
    found, _ = search_of_epochs(epoch_batches, own=own, may_keep=may_keep)
    result = assembled(found, 1.0)
    assert result.best.num_workers > 0
    assert result.best.persistent_workers == is_kept
    # THEN either is said
    said = {row for row in Caution for each in result.warnings if row.said_by(each)}
    assert (Caution.WORKERS_KEPT in said) == is_kept
    assert (Caution.EPOCH_STARTS in said) == starts_count
    # AND what is written is what was measured, in rounds, and the user's own stays as it is
    assert len(result.rates_of(result.best)) >= 2
    assert own is None or own in {trial.config for trial in result.trials}


class Spawned(SimulatedProbe):
    """Tells the start of workers where it was one of training."""

    def burst(self, config, plan):
        found = super().burst(config, plan)
        self.anew = getattr(self, "anew", [])
        self.anew += [config.num_workers] * (plan.anew and config.num_workers > 0)
        return found if plan.anew else replace(found, first_batch_s=None)


@pytest.mark.parametrize(
    ("epoch_batches", "is_kept", "is_once"),
    [(100_000, False, True), (20, True, True), (20, False, False), (None, False, True)],
)
def test_workers_start_as_in_training_where_that_counts(epoch_batches, is_kept, is_once):
    found, probe = search_of_epochs(epoch_batches, probe=Spawned, persistent_workers=is_kept)
    ran = [trial.config.num_workers for trial in found.trials if trial.config.num_workers]
    numbers = list(dict.fromkeys(ran))
    assert len(numbers) > 1
    assert probe.anew == (numbers[:1] if is_once else numbers)


def planned(config, *trials, round_=None, budget_s=60.0, first_batch_s=0.02, **context):
    """How a burst is run on two cores, after these."""
    plans, failure = [], Failure(kind="deadline", phase="start", message="no")
    probe = SimpleNamespace(burst=lambda config, plan: plans.append(plan) or failure)
    context, budget = Context(**{"usable_cores": 2, **context}), Budget(budget_s, FakeClock())
    Bursts(probe, context, budget, lambda: trials, first_batch_s).run(config, 9, round_)
    return plans[0]


FILLED = {
    # start method, seconds of the first batch, cores, of the step, prefetch: seconds, and batches
    "as long as the workers take": ("fork", 0.1, 2, 1.0, 8, (0.1, 7)),
    "a long start is not waited for": ("fork", 3.0, 2, 1.0, 8, (0.75, 0)),
    "clones": ("spawn", 3.0, 2, 1.0, 8, (CLONED_S, 8)),
    "half of the cores are busy": ("fork", 0.1, 8, 1.0, 8, (0.0, 0)),
    "more are, with the step": ("fork", 0.1, 8, 1.1, 8, (0.1, 7)),
    "shallow queues": ("fork", 0.1, 2, 1.0, 2, (0.1, 1)),
    "queues that were full": ("fork", 0.1, 2, 1.0, 1, (0.0, 0)),
}


@pytest.mark.parametrize("case", FILLED.values(), ids=FILLED)
def test_queues_are_filled_before_a_round(case):
    # GIVEN three workers that compute, and were enough
    method, first_batch_s, cores, step_cores, prefetch, (seconds, batches) = case
    machine = SimulatedMachine(cores=cores, cpu_s=0.01, step_s=0.03)
    config = with_workers(3, prefetch, multiprocessing_context=method)
    [trial] = simulated_trials(machine, config)
    took = replace(
        trial.measurement, first_batch_s=first_batch_s, service_cpu_s=0.01, service_s=0.01
    )
    context = {"usable_cores": cores, "step_cores": step_cores}
    plan = planned(config, replace(trial, measurement=took), round_=0, **context)
    assert plan.prefill_s == pytest.approx(seconds + batches * 0.01)
    assert plan.max_s == ROUND_BURST.max_s


TURNS = {
    # workers, cores: seconds of some turns of them, at least and at most
    "as the most similar took": (4, 4, (0.45, 0.6)),
    "more of them share the cores": (4, 2, (0.63, 0.63)),
    "the nearest is another": (12, 2, (2.25, 2.25)),
    "no longer than 3 s": (64, 2, (3.0, 3.0)),
    "none": (0, 2, (0.3, 0.6)),
}


@pytest.mark.parametrize(("workers", "cores", "lasts"), TURNS.values(), ids=TURNS)
def test_a_burst_lasts_some_turns_of_workers(workers, cores, lasts):
    # GIVEN bursts of 2 workers that took 100 ms for a batch, 40 of them computing, and of 8
    took = {2: (0.1, 0.04), 8: (0.4, 0.2), 0: (9.0, 9.0)}
    shape = simulated_trials(SimulatedMachine(), TWO)[0].measurement
    seen = [
        Trial.of(0, with_workers(count), replace(shape, service_s=wall_s, service_cpu_s=cpu_s))
        for count, (wall_s, cpu_s) in took.items()
    ]
    plan = planned(with_workers(workers), *seen, usable_cores=cores)
    assert (plan.min_s, plan.max_s) == pytest.approx(lasts)


DEADLINES = {
    # start method, workers, first batch, start of a process, budget, seconds of an earlier burst
    "a fast batch": ("fork", 2, 0.02, 2.0, 20.0, 0.0, 20.0 / 3),
    "a long budget": ("fork", 2, 0.02, 2.0, 600.0, 0.0, 7.4),
    "many workers": ("fork", 64, 0.02, 2.0, 600.0, 0.0, 10 * (3.2 + 2 * 0.33 + 0.6)),
    "a slow batch": ("fork", 2, 22.0, 2.0, 20.0, 0.0, 2 * 44.7),
    "a slow import": ("spawn", 2, 0.02, 10.0, 60.0, 0.0, 2 * 10.64),
    "clones": ("forkserver", 8, 0.02, 3.0, 600.0, 0.0, 10 * (3.8 + 2 * 0.05 + 0.6)),
    "a short budget": ("fork", 2, 0.02, 2.0, 3.0, 0.0, 5.0),
    "a slow burst": ("fork", 2, 0.02, 2.0, 60.0, 1.5, 15.0),
}


@pytest.mark.parametrize("case", DEADLINES.values(), ids=DEADLINES)
def test_a_hang_is_told_from_a_slow_start(case):
    method, workers, first_batch_s, start_s, budget_s, took_s, deadline_s = case
    known = {"first_batch_s": first_batch_s, "start_s": start_s, "fetch_cpu_s": 0.01}
    seen = [
        Trial.of(0, NONE, simulated_trials(SimulatedMachine(), NONE)[0].measurement, seconds=took_s)
    ]
    config = with_workers(workers, multiprocessing_context=method)
    assert planned(config, *seen, budget_s=budget_s, **known).deadline_s == pytest.approx(
        deadline_s
    )


@pytest.mark.parametrize(
    ("wait_s", "read_bytes", "is_same"),
    [(0.0, 0, True), (0.0, 4096, False), (0.04, 0, False)],  # in memory, disk, not counted
)
def test_a_round_reads_the_same_from_memory(wait_s, read_bytes, is_same):
    places = []

    class Reading(SimulatedProbe):
        def burst(self, config, plan):
            places.append(plan.place)
            return replace(super().burst(config, plan), read_bytes=read_bytes)

    machine = SimulatedMachine(cpu_s=0.01, wait_s=wait_s)
    found, _ = search_on(machine, probe=Reading, budget_s=12.0)
    rounds = [trial.round for trial in found.trials]
    assert len({*rounds}) > 2
    assert places == (rounds if is_same else [None] * len(rounds))


class PerBatch(SimulatedProbe):
    """A step that takes as long for every batch; samples cost the workers the same."""

    taken_mib = 0.5  # of 100 MiB of the device, for each sample

    def burst(self, config, plan):
        size = config.batch_size or 32
        self.machine = replace(self.machine, batch_size=size, cpu_s=0.005 * size / 32)
        found = super().burst(replace(config, batch_size=None), plan)
        return replace(found, gpu_memory_bytes=int(self.taken_mib * size * 2**20))


class Greedy(PerBatch):
    taken_mib = 1.5


SIZES = Space(
    max_workers=4, batch_size=(None, 64, 16), limits=Limits(device_bytes=50 << 20),
    batch=BatchCost(bytes=1 << 20, samples=32),
)  # fmt: skip


def test_a_batch_size_is_chosen_where_it_gains():
    search, _ = search_on(SimulatedMachine(), probe=PerBatch, space=SIZES, budget_s=30.0)
    found = assembled(search, 1.0)
    assert found.best.batch_size == found.batch_size == 64
    assert found.ceiling is None  # it is of the user's own size
    # THEN it is compared with the user's own
    assert search.trials[0].config == TWO
    assert found.speedup.value > 1.5
    assert any(Caution.BATCH_SIZE.said_by(each) for each in found.warnings)


def test_a_too_large_batch_size_is_out():
    # GIVEN batches of 64 that take 96 of 50 MiB of the device, and the user's own, which take 48
    found, _ = search_on(SimulatedMachine(), probe=Greedy, space=SIZES, budget_s=30.0)
    by_size = {trial.config.batch_size: trial for trial in found.trials}
    assert by_size[64].failure.kind == "device_memory"
    assert "96 MiB of 50 MiB of device memory" in by_size[64].failure.message
    # THEN the user's own is the user's, and less is no matter
    assert by_size[None].measurement is not None
    assert by_size[16].measurement is not None
    assert assembled(found, 1.0).best.batch_size != 64
