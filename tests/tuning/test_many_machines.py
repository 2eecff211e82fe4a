"""One study shared by several hosts through PostgreSQL, one of which is lost while they are at it."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from autotune_loader.decision.space import Space
from autotune_loader.machine.processes import process_start
from autotune_loader.machine.ranks import Place
from autotune_loader.tuning import session
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.study import LOST_S, SINCE, OptunaStudy, open_database
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.serialization import to_plain
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_run
from tests.support.searching import SILENT

if TYPE_CHECKING:
    from preloaded import PreloadedPython


def a_ledger(folder: Path) -> OptunaStudy:
    space = Space(max_workers=8)
    return OptunaStudy(storage=str(folder / "study.journal"), name="shared", space=space, search="random", seed=0)


ME = Place.here()
PARENT = replace(ME, pid=os.getppid(), began=str(process_start(os.getppid())))
THERE = replace(ME, node="elsewhere")


@pytest.mark.parametrize(
    ("owner", "ago_s", "is_run", "state"),
    [
        (THERE, 1.0, True, "RUNNING"),
        (THERE, LOST_S + 1, False, "RUNNING"),  # of a host that is lost; its clock may be wrong
        (PARENT, LOST_S + 1, True, "RUNNING"),  # alive, however long it takes
        (replace(ME, pid=999999999), 1.0, False, "FAIL"),
        (replace(PARENT, began="0"), 1.0, False, "FAIL"),  # another process has its ID now
        (ME, 1.0, False, "FAIL"),  # of an earlier run in this process
    ],
    ids=["elsewhere", "elsewhere_and_lost", "alive", "ended", "ended_and_its_id_given_again", "an_earlier_run_of_ours"],
)
def test_what_others_run_is_passed_over_and_what_died_is_not(
    tmp_path: Path, owner: Place, ago_s: float, is_run: bool, state: str
) -> None:
    # GIVEN a running trial of somebody
    claim = a_ledger(tmp_path).ask(LoaderConfig(num_workers=3))
    claim.asked.set_user_attr("owner", to_plain(owner))
    claim.asked.set_user_attr("since", time.time() - ago_s)
    # WHEN a run of ours begins
    mine = a_ledger(tmp_path)
    # THEN it knows what is run by others, lets their trials run, and ends what nobody runs any more
    assert mine.elsewhere() == ({claim.config} if is_run else set())
    assert [trial.state.name for trial in mine.study.get_trials(deepcopy=False)] == [state]


@pytest.mark.parametrize("config", [LoaderConfig(num_workers=3), None], ids=["asked", "proposed by the sampler"])
def test_of_two_who_begin_at_once_the_first_counts_and_nobody_meets_half_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LoaderConfig | None
) -> None:
    theirs, mine, write = a_ledger(tmp_path), a_ledger(tmp_path), optuna.trial.Trial.set_user_attr
    seen = list[set[LoaderConfig]]()

    def watched(trial: optuna.trial.Trial, name: str, value: Any) -> None:
        write(trial, name, value)
        seen.append(mine.elsewhere())  # does not fail

    monkeypatch.setattr(Place, "here", lambda: THERE)
    monkeypatch.setattr(optuna.trial.Trial, "set_user_attr", watched)
    first = theirs.ask(config)
    assert config is None or not seen  # written at once, with the trial
    second = mine.ask(first.config)
    assert first.config in mine.elsewhere(before=second)
    assert first.config not in theirs.elsewhere(before=first)


@pytest.fixture
def url() -> Iterator[str]:
    """Of a PostgreSQL server of our own, run by somebody who is not root."""
    if any(shutil.which(program) is None for program in ("initdb", "pg_ctl", "postgres")):
        pytest.skip("needs initdb, pg_ctl and postgres (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="needs pip install 'autotune-loader[postgres]'")
    users = {"postgres", "nobody"} & {each.pw_name for each in pwd.getpwall()}
    user = max(users) if os.geteuid() == 0 else None  # the server refuses to be run by root
    folder = Path(tempfile.mkdtemp(prefix="autotune-pg-"))  # not tmp_path: its parents are closed to other users
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [shutil.which(program) or "", "-D", str(folder / "data"), *arguments], user=user, cwd=folder, timeout=60,
            check=True, env={"PATH": os.environ["PATH"], "LC_ALL": "C"}, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    run("initdb", "-U", "tuner", "-A", "trust", "-E", "UTF8", "--no-sync")
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"  # a port might be taken
    run("pg_ctl", "-l", str(folder / "log"), "-w", "-o", options, "start")
    try:
        yield f"postgresql+psycopg://tuner@/postgres?host={folder}"
    finally:
        run("pg_ctl", "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


GRID = Space(max_workers=2, workers_are_capped=True)


def run_host(url: str, name: str, on_burst: Callable[[int], None] = lambda number: None) -> tuple[int, int]:
    """Search the grid as a host of this name; its trials, others' among them, and its bursts."""

    class Probe(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
            on_burst(len(self.bursts))
            return super().burst(config, plan)

    clock = FakeClock()
    probe = Probe(SimulatedMachine(), clock)
    options = TuneOptions(storage=url, search="grid", budget_s=1e6, study_name="shared")
    run = simulated_run(probe.machine, GRID, has_step=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: name)
        patch.setattr(session, "run_finals", lambda *_: None)
        search = session.TuningSession(probe, run, options, clock=clock, started=0.0, listener=SILENT)
        return len(search.run().trials), len(probe.bursts)


LOST_HOST = f"""
import sys, time
from pathlib import Path
sys.path[:0] = {sys.path}
from test_many_machines import run_host

def stand_still(number):
    if number == 2:
        Path("stands-still").touch()
        time.sleep(600)

run_host(sys.argv[1], "second", stand_still)
"""


@pytest.mark.system
def test_two_hosts_share_a_study_and_one_that_is_killed_loses_nothing(
    url: str, tmp_path: Path, preloaded: PreloadedPython
) -> None:
    # GIVEN two hosts that take trials of one study, a grid of nine configurations
    (tmp_path / "host.py").write_text(LOST_HOST)
    storage = open_database(url)
    second = preloaded.start("host.py", url, folder=tmp_path)

    def trials() -> list[optuna.trial.FrozenTrial]:
        return optuna.load_study(study_name="shared", storage=storage).get_trials()

    def lose_the_second(number: int) -> None:
        if number != 3:
            return
        while not (tmp_path / "stands-still").exists():
            assert second.poll() is None, second.output
            time.sleep(0.05)
        second.kill()
        second.wait(timeout=60)
        (theirs,) = [each for each in trials() if (each.state.name, node_of(each)) == ("RUNNING", "second")]
        storage.set_trial_user_attr(theirs._trial_id, SINCE, time.time() - LOST_S - 1)

    try:
        # WHEN one is killed in the middle of its third trial, and a minute passes
        found, _ = run_host(url, "first", lose_the_second)
        # THEN the other comes to the end, and what was running on the lost one was run again
        told = [each for each in trials() if each.state.name == "COMPLETE"]
        assert Counter(LoaderConfig.from_dict(each.user_attrs["config"]) for each in told) == Counter(GRID.configs())
        assert Counter(node_of(each) for each in told) == {"first": 7, "second": 2}
        # AND WHEN the lost one begins again THEN it has all trials, runs none, and no trial is left running
        assert run_host(url, "second") == (found, 0) == (9, 0)
        assert {each.state.name for each in trials()} <= {"COMPLETE", "FAIL"}
    finally:
        storage.remove_session()
        storage.engine.dispose()
        if second.poll() is None:
            second.kill()
        second.wait(timeout=10)


def node_of(trial: optuna.trial.FrozenTrial) -> str:
    return trial.user_attrs["owner"]["node"]
