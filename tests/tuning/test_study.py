"""The ledger: an Optuna study that survives kills, tells failures as samplers need them told, and stays quiet."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace

import optuna
import pytest

from autotune_loader.decision.space import Space
from autotune_loader.tuning.study import OptunaStudy, open_storage
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial, role_of
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

States = optuna.trial.TrialState
SPACE = Space(
    max_workers=6,
    pin_memory=(False, True),
    consumer_threads=(None, 2, 1),
    in_order=(True, False),
    multiprocessing_contexts=(None, "spawn"),
    device_prefetch=(0, 2),
    persistent_workers=True,
    drop_lasts=(True,),
)
CRASH = Failure(kind="crashed", phase="batches", message="worker 1 died", traceback="Traceback ...")


def ledger(storage=None, **changes):
    options = {"name": "test", "space": SPACE, "search": "tpe", "seed": 0, **changes}
    return OptunaStudy(storage=None if storage is None else str(storage), **options)


def workers(count, **options):
    return LoaderConfig(num_workers=count, **options)


def measurement(rate=100.0, **interval):
    probe = SimulatedProbe(SimulatedMachine(), FakeClock())
    measured = probe.burst(LoaderConfig(), BurstPlan(max_s=0.4, min_s=0.1))
    bounds = {"value": rate, "low": rate - 1, "high": rate + 1, "count": 10, **interval}
    return replace(measured, samples_per_s=Interval(**bounds))


def success(number, config, rate=100.0, **interval):
    return Trial(number=number, config=config, role="search", measurement=measurement(rate, **interval), seconds=1.0)


def failure(number, config):
    return Trial(number=number, config=config, role="search", failure=CRASH)


def run(book, *trials):
    for trial in trials:
        claim = book.ask(trial.config)
        book.tell(claim, trial)


def lean(trial):
    if trial.measurement is None:
        return trial
    return replace(trial, measurement=replace(trial.measurement, traces=()))


# Telling


def test_any_reader_of_optuna_sees_what_was_measured(tmp_path):
    # GIVEN a journal, which takes JSON only
    path = tmp_path / "study.journal"
    # WHEN trials are told
    run(ledger(path), success(0, workers(2), rate=123.0), failure(1, workers(3)))
    # THEN Optuna alone shows their workers, rates and every metric
    study = optuna.load_study(study_name="test", storage=open_storage(str(path)))
    frame = study.trials_dataframe()
    assert list(frame["params_num_workers"]) == [2, 3]
    assert list(frame["state"]) == ["COMPLETE", "PRUNED"]
    assert frame["value"][0] == 123.0
    metrics = ("wait_share", "rss_bytes", "samples_per_s_low", "failure_message")
    assert {f"user_attrs_{name}" for name in metrics} <= set(frame)
    attributes = json.loads(json.dumps(study.trials[0].user_attrs, allow_nan=False))
    assert attributes["samples_per_s_low"] == 122.0
    assert attributes["config"] == workers(2).to_dict()


def test_the_journal_is_strict_json_even_with_an_unbounded_rate(tmp_path):
    path = tmp_path / "study.journal"
    run(ledger(path), success(0, workers(2), low=float("-inf"), high=float("inf")))
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_failure_is_pruned_with_its_message_and_never_the_best():
    # GIVEN a slow success and a failure
    book = ledger()
    run(book, success(0, workers(1), rate=10.0), failure(1, workers(2)))
    # THEN the best is the success
    frozen = book.study.get_trials()[1]
    assert (frozen.state, frozen.user_attrs["failure_kind"]) == (States.PRUNED, "crashed")
    assert book.study.best_trial.number == 0


def test_an_abandoned_trial_carries_no_information():
    book = ledger()
    claim = book.ask(workers(2))
    book.abandon(claim)
    assert [frozen.state for frozen in book.study.get_trials()] == [States.FAIL]
    assert book.restored() == []


# Asking


@pytest.mark.parametrize("search", ["auto", "tpe", "random", "grid"])
def test_only_legal_configs_are_proposed(search):
    # GIVEN a study in which some configurations fail
    book, legal = ledger(search=search), set(SPACE.configs())
    counts = set(SPACE.worker_counts())
    # WHEN the sampler proposes
    proposals = []
    for number in range(40):
        claim = book.ask()
        config = claim.config
        fails = config.num_workers > 4
        book.tell(claim, failure(number, config) if fails else success(number, config, rate=1.0 + config.num_workers))
        proposals.append(config)
    # THEN everything proposed is in the space
    assert counts >= {config.num_workers for config in proposals}
    assert legal >= set(proposals)
    assert len(set(proposals)) > 10


def test_the_sampler_leaves_what_fails():
    # GIVEN studies in which more than 20 of up to 64 workers crash and fewer do not
    late = []
    for seed in range(4):
        book = ledger(space=Space(max_workers=64), seed=seed)
        for number in range(40):
            claim = book.ask()
            config = claim.config
            fails = config.num_workers > 20
            rate = 1.0 + config.num_workers
            book.tell(claim, failure(number, config) if fails else success(number, config, rate=rate))
        late += book.restored()[20:]
    # THEN the later proposals hardly crash
    assert sum(trial.failure is not None for trial in late) < len(late) / 2


@pytest.mark.parametrize(
    "config",
    [
        workers(3, prefetch_factor=4, consumer_threads=1, in_order=False, multiprocessing_context="spawn"),
        workers(500),
        workers(2, prefetch_factor=1000, multiprocessing_context="forkserver"),
        LoaderConfig(consumer_threads=5000),
        LoaderConfig(batch_size=17, device_prefetch=9, sharing_strategy="file_system"),
    ],
    ids=str,
)
def test_a_config_is_taken_as_it_is_also_outside_the_space(config):
    # WHEN a configuration is asked that may be outside of what is searched
    book = ledger()
    claim = book.ask(config)
    book.tell(claim, success(0, config))
    # THEN it is recorded unchanged, and the sampler goes on from there
    assert (claim.config, claim.asked.params["num_workers"]) == (config, min(config.num_workers, SPACE.max_workers))
    assert book.restored()[0].config == config
    assert book.ask().config in set(SPACE.configs())


def test_proposals_depend_on_the_seed_alone():
    def proposals(seed):
        book = ledger(seed=seed)
        found = []
        for number in range(12):
            claim = book.ask()
            config = claim.config
            book.tell(claim, success(number, config, rate=1.0 + config.num_workers))
            found.append(config)
        return found

    assert proposals(1) == proposals(1) != proposals(2)


# Storages


@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_a_study_is_resumed_with_its_trials(tmp_path, storage):
    # GIVEN a success that was told twice, and a failure
    odd = replace(failure(1, workers(2)), failure=replace(CRASH, message="cannot open 'bad-\udcff.jpg'"))
    trials = [success(0, workers(1), low=0.0, high=float("inf")), odd]
    first = ledger(storage.format(tmp_path))
    run(first, *trials, trials[0])
    first.close()
    # WHEN it is opened again
    again = ledger(storage.format(tmp_path))
    # THEN each trial is there once, without traces
    assert [each.config for each in again.restored()] == [workers(1), workers(2)]
    assert again.restored()[0] == lean(trials[0])
    again.close()


def test_a_trial_that_a_killed_run_left_running_is_told(tmp_path):
    # GIVEN a run that was killed in the middle of a trial
    path = tmp_path / "study.journal"
    ledger(path).ask(workers(1))
    # WHEN the study is opened again
    again = ledger(path)
    # THEN the trial runs no more
    assert [frozen.state for frozen in again.study.get_trials()] == [States.FAIL]


def test_what_somebody_enqueued_is_run_first_and_never_mistaken_for_what_is_asked(tmp_path):
    # GIVEN a trial that somebody has enqueued
    book = ledger(tmp_path / "study.journal")
    book.study.enqueue_trial({"num_workers": 5, "prefetch_factor": 2})
    # WHEN a configuration is asked, twice
    first, second = book.ask(workers(3)), book.ask(workers(3))
    # THEN each is told as what it is
    assert (first.config.num_workers, first.config.prefetch_factor, first.asked.params["num_workers"]) == (5, 2, 5)
    assert (second.config, second.asked.params["num_workers"]) == (workers(3), 3)


def test_a_database_that_another_program_locks_for_a_moment_is_waited_for(tmp_path):
    # GIVEN a dashboard that holds the database for a second
    book = ledger(f"sqlite:///{tmp_path}/study.db")
    claim = book.ask(workers(1))
    other = sqlite3.connect(tmp_path / "study.db", check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(1.0, other.rollback)
    release.start()
    # WHEN a trial is told
    book.tell(claim, success(0, workers(1)))
    # THEN it is in the database
    release.join()
    other.close()
    book.close()
    again = ledger(f"sqlite:///{tmp_path}/study.db")
    assert len(again.restored()) == 1
    again.close()


def test_a_storage_that_fails_in_the_middle_of_a_run_loses_neither_trials_nor_run(tmp_path, caplog):
    # GIVEN a journal that is lost for good while a trial runs
    path = tmp_path / "study.journal"
    book = ledger(path)
    run(book, success(0, workers(1)))
    claim = book.ask(workers(2))
    path.unlink()
    path.mkdir()
    # WHEN the run goes on
    book.tell(claim, success(1, workers(2)))
    run(book, success(2, workers(3)))
    # THEN the study holds what was told since, and says what happened
    assert {2, 3} <= {trial.config.num_workers for trial in book.restored()}
    assert "in memory" in caplog.text


def test_a_torn_last_line_is_mended_and_nothing_else_is_lost(tmp_path, caplog):
    # GIVEN a journal whose last write was cut off
    path = tmp_path / "study.journal"
    run(ledger(path), success(0, workers(1)))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 5, "trial_id')
    # WHEN it is opened and written to
    book = ledger(path)
    run(book, success(1, workers(2)))
    # THEN both trials are there, also for the next reader, and the loss was told
    assert [trial.number for trial in ledger(path).restored()] == [0, 1]
    assert "dropped" in caplog.text


@pytest.mark.process
def test_a_lock_left_by_a_killed_run_holds_nobody_up_for_long(tmp_path):
    # GIVEN the lock of a process that is no more
    path = tmp_path / "study.journal"
    run(ledger(path), success(0, workers(1)))
    lock = tmp_path / "study.journal.lock"
    lock.symlink_to(path)
    # WHEN the study is opened
    begun = time.monotonic()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        again = ledger(path)
    # THEN it takes a few seconds, not Optuna's thirty
    assert time.monotonic() - begun < 10
    assert len(again.restored()) == 1


def test_a_journal_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "study.journal"
    before = os.umask(0)
    try:
        ledger(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# Manners


@pytest.mark.parametrize("level", [optuna.logging.DEBUG, optuna.logging.ERROR])
def test_the_verbosity_of_optuna_is_put_back(level):
    before = optuna.logging.get_verbosity()
    try:
        optuna.logging.set_verbosity(level)
        run(ledger(), success(0, workers(1)))
        assert optuna.logging.get_verbosity() == level
    finally:
        optuna.logging.set_verbosity(before)


@pytest.mark.process
def test_nothing_is_printed_or_warned_about(tmp_path):
    # WHEN a program that turns every warning into an error uses a ledger with odd configurations
    code = f"""
import warnings; warnings.simplefilter("error")
from autotune_loader.values.config import LoaderConfig
from autotune_loader.decision.space import Space
from autotune_loader.tuning.study import OptunaStudy, open_storage
from autotune_loader.values.measurement import Failure
from autotune_loader.values.trial import Trial
book = OptunaStudy(storage={str(tmp_path / "s.journal")!r}, name="n", space=Space(max_workers=4, pin_memory=(False, True)),
              search="tpe", seed=0)
failure = Failure(kind="crashed", phase="start", message="m")
for number, config in enumerate([LoaderConfig(num_workers=900, prefetch_factor=900), *[None] * 6]):
    claim = book.ask(config)
    config = claim.config
    book.tell(claim, Trial(number=number, config=config, role="search", failure=failure))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    # THEN it says nothing
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_roles():
    own = workers(2)
    assert role_of(own, own) == "baseline"
    assert role_of(LoaderConfig(), own) == "default"
    assert role_of(LoaderConfig(), LoaderConfig()) == "baseline"
    assert role_of(workers(3), None) == "search"
