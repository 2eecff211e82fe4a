"""One study shared by several hosts through PostgreSQL, one of which is lost while they are at it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune_loader.decision.space import Space
from autotune_loader.machine.processes import process_start
from autotune_loader.machine.ranks import Place
from autotune_loader.tuning.study import LOST_S, OptunaStudy, open_database
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.serialization import to_plain

ROOT = Path(__file__).resolve().parents[2]


def a_ledger(url: str) -> OptunaStudy:
    return OptunaStudy(storage=url, name="shared", space=Space(max_workers=8), search="random", seed=0)


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
    url = f"sqlite:///{tmp_path}/study.db"
    theirs = a_ledger(url)
    claim = theirs.ask(LoaderConfig(num_workers=3))
    claim.asked.set_user_attr("owner", to_plain(owner))
    claim.asked.set_user_attr("since", time.time() - ago_s)
    # WHEN a run of ours begins
    mine = a_ledger(url)
    # THEN it knows what is run by others, lets their trials run, and ends what nobody runs any more
    assert mine.elsewhere() == ({claim.config} if is_run else set())
    assert [trial.state.name for trial in mine.study.get_trials(deepcopy=False)] == [state]
    theirs.close()
    mine.close()


def test_of_two_who_begin_at_once_the_first_counts(tmp_path: Path) -> None:
    url, config = f"sqlite:///{tmp_path}/study.db", LoaderConfig(num_workers=3)
    theirs, mine = a_ledger(url), a_ledger(url)
    first = theirs.ask(config)
    first.asked.set_user_attr("owner", to_plain(THERE))
    second = mine.ask(config)
    assert config in mine.elsewhere(before=second)
    assert config not in theirs.elsewhere(before=first)
    theirs.close()
    mine.close()


class Server:
    """A PostgreSQL server of our own on loopback, run by somebody who is not root."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder, self.user = folder, user
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self._run("initdb", "-D", str(folder / "data"), "-U", "tuner", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.url = f"postgresql+psycopg://tuner@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off"
        self._run(
            "pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", options, "start"
        )

    def kill(self) -> None:
        """As a crash would end it: every connection breaks at once."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        found = shutil.which(program) or ""
        done = subprocess.run(
            [found, *arguments], user=self.user, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=60, check=False, env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, f"{program} {arguments} failed"


@pytest.fixture
def server() -> Iterator[Server]:
    for program in ("initdb", "pg_ctl", "postgres"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="needs pip install 'autotune-loader[postgres]'")
    user = None
    if os.geteuid() == 0:  # the server refuses to be run by root
        user = next((name for name in ("postgres", "nobody") if _exists(name)), None)
        if user is None:
            pytest.skip("runs as root, and there is no other user to run the server as")
    # Not tmp_path: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="autotune-pg-"))
    if user is not None:
        shutil.chown(folder, user)
    server = Server(folder, user)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


HOST = """
    import json, platform, sys, time
    platform.node = lambda: sys.argv[2]
    from autotune_loader.tuning import study
    study.LOST_S = 2.0
    from autotune_loader.tuning import session
    from autotune_loader.tuning.session import TuningSession
    from autotune_loader.tuning.options import TuneOptions
    from autotune_loader.decision.space import Space
    from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_run

    class Probe(SimulatedProbe):
        def burst(self, config, plan):
            time.sleep(0.15)
            return super().burst(config, plan)

    class Nobody:
        def trial(self, state, trial, seconds_left): print("TRIAL", flush=True)
        def finals_round(self, number, rates, seconds_left): pass

    clock = FakeClock()
    probe = Probe(SimulatedMachine(), clock)
    options = TuneOptions(storage=sys.argv[1], search="grid", budget_s=1e6)
    run = simulated_run(probe.machine, Space(max_workers=8), has_step=False)
    search = TuningSession(probe, run, options, clock=clock, started=0.0, listener=Nobody(), study_name="shared")
    session.run_finals = lambda *_: None
    found = search.run()
    print("SAID", json.dumps([trial.config.to_dict() for trial in found.trials]), flush=True)
"""


@pytest.mark.system
@pytest.mark.timeout(110)
def test_two_hosts_share_a_study_and_one_that_is_killed_loses_nothing(server: Server, tmp_path: Path) -> None:
    # GIVEN two hosts that take trials of one study, a grid of 33 configurations
    script = tmp_path / "host.py"
    script.write_text(textwrap.dedent(HOST))
    started: list[subprocess.Popen[str]] = []

    def host(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), server.url, name]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        )
        return started[-1]

    try:
        first, second = host("first"), host("second")
        assert second.stdout is not None
        lines = [second.stdout.readline() for _ in range(4)]
        assert lines[-1].startswith("TRIAL"), "".join(lines + second.stdout.readlines())
        # WHEN one is killed in the middle of a trial
        second.kill()
        output = first.communicate(timeout=60)[0]
        # THEN the other comes to the end, and what was running on the lost one was run again
        told = trials_of(server.url)
        assert "SAID" in output
        configs = Counter(config for _, state, config in told if state == "COMPLETE")
        assert set(configs) == set(Space(max_workers=8).configs())
        assert set(configs.values()) == {1}
        counts = Counter(node for node, state, _ in told if state == "COMPLETE")
        assert set(counts) == {"first", "second"}
        assert counts["second"] >= 4

        # AND WHEN the lost one begins again THEN it has all trials, runs none, and no trial is left running
        again = host("second").communicate(timeout=60)[0]
        assert len(json.loads(again[again.index("SAID ") :].removeprefix("SAID "))) == len(configs)
        assert "TRIAL" not in again
        assert {state for _, state, _ in trials_of(server.url)} <= {"COMPLETE", "FAIL"}
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
            each.communicate()


def trials_of(url: str) -> list[tuple[str, str, LoaderConfig]]:
    """Node, state and configuration of every trial, as Optuna alone reads them."""
    storage = open_database(url)
    trials = optuna.load_study(study_name="shared", storage=storage).get_trials()
    storage.remove_session()
    storage.engine.dispose()
    return [
        (
            trial.user_attrs["owner"]["node"],
            trial.state.name,
            LoaderConfig.from_dict(trial.user_attrs["config"]),
        )
        for trial in trials
    ]
