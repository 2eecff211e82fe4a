"""The ledger: an Optuna study that survives kills, tells failures as samplers need them told, and stays quiet."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import replace

import optuna
import pytest

from autotune_loader.decision.space import Space
from autotune_loader.tuning.study import OptunaStudy
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
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


def test_a_study_of_another_job_is_refused_by_name(tmp_path):
    path = tmp_path / "study.journal"
    run(ledger(path, job="small model"), success(0, workers(1)))
    assert len(ledger(path, job="small model").restored()) == 1
    with pytest.raises(ValueError, match="study_name='test' has trials of another job"):
        ledger(path, job="large model")


# Telling and asking


@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_a_study_is_resumed_with_its_trials_and_any_reader_of_optuna_sees_what_was_measured(tmp_path, storage):
    # GIVEN a success that was told twice, a failure that JSON cannot hold as it is, and a trial that was given up
    url = storage.format(tmp_path)
    odd = replace(failure(1, workers(3)), failure=replace(CRASH, message="cannot open 'bad-\udcff.jpg'"))
    trials = [success(0, workers(2), low=float("-inf"), high=float("inf")), odd]
    first = ledger(url)
    run(first, *trials, trials[0])
    first.abandon(first.ask(workers(4)))
    first.close()
    # WHEN it is opened again THEN each trial is there once, without traces
    again = ledger(url)
    assert again.restored() == [lean(trials[0]), again.restored()[1]]
    assert [each.config for each in again.restored()] == [workers(2), workers(3)]
    # AND Optuna alone shows their workers, rates and every metric; failures are never the best
    frame = again.study.trials_dataframe()
    assert list(frame["params_num_workers"]) == [2, 3, 2, 4]
    assert list(frame["state"]) == ["COMPLETE", "PRUNED", "COMPLETE", "FAIL"]
    assert frame["value"][0] == again.study.best_value == 100.0
    metrics = ("wait_share", "rss_bytes", "samples_per_s_low", "failure_kind", "failure_message")
    assert {f"user_attrs_{name}" for name in metrics} <= set(frame)
    json.dumps([each.user_attrs for each in again.study.trials], allow_nan=False)
    assert again.study.trials[0].user_attrs["config"] == workers(2).to_dict()
    again.close()


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


@pytest.mark.parametrize("search", ["auto", "tpe", "random", "grid"])
def test_only_legal_configs_are_proposed_in_silence(search, capfd):
    # GIVEN a study in which some configurations fail WHEN the sampler proposes
    book, proposals = ledger(search=search), set()
    before = optuna.logging.get_verbosity()
    for number in range(40):
        claim = book.ask()
        config = claim.config
        fails = config.num_workers > 4
        book.tell(claim, failure(number, config) if fails else success(number, config, rate=1.0 + config.num_workers))
        proposals.add(config)
    # THEN everything proposed is in the space, and nothing is printed or, as the suite's filter knows, warned about
    assert proposals <= set(SPACE.configs())
    assert len(proposals) > 10
    assert (capfd.readouterr(), optuna.logging.get_verbosity()) == (("", ""), before)


# Storages


def test_what_somebody_enqueued_is_run_first_and_never_mistaken_for_what_is_asked(tmp_path):
    # GIVEN a trial that somebody has enqueued
    book = ledger(tmp_path / "study.journal")
    book.study.enqueue_trial({"num_workers": 5, "prefetch_factor": 2})
    # WHEN a configuration is asked, twice
    first, second = book.ask(workers(3)), book.ask(workers(3))
    # THEN each is told as what it is
    assert (first.config.num_workers, first.config.prefetch_factor, first.asked.params["num_workers"]) == (5, 2, 5)
    assert (second.config, second.asked.params["num_workers"]) == (workers(3), 3)


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


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*lock file.*")
def test_what_a_killed_writer_leaves_holds_nobody_up_for_long_and_loses_no_whole_line(tmp_path, caplog):
    # GIVEN a journal whose last write was cut off, with the lock of a process that is no more
    path = tmp_path / "study.journal"
    run(ledger(path), success(0, workers(1)))
    path.write_bytes(path.read_bytes() + b'{"op_code": 5, "trial_id')
    (tmp_path / "study.journal.lock").symlink_to(path)
    # WHEN it is opened and written to
    begun = time.monotonic()
    run(ledger(path), success(1, workers(2)))
    # THEN that takes a few seconds, not Optuna's thirty, both trials are there, and the loss was told
    assert time.monotonic() - begun < 10
    assert [trial.number for trial in ledger(path).restored()] == [0, 1]
    assert "dropped" in caplog.text


def test_a_journal_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "study.journal"
    before = os.umask(0)
    try:
        ledger(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
