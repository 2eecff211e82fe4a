"""One study shared by several processes through PostgreSQL, which goes away and comes back while they are at it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune_loader.decision.space import Space
from autotune_loader.machine.processes import process_start
from autotune_loader.tuning.study import LOST_S, OptunaStudy, owner
from autotune_loader.tuning.study_storage import is_connection_loss, open_database, patiently
from autotune_loader.values.config import LoaderConfig
from tests.support import FakeClock

ROOT = Path(__file__).resolve().parents[2]


class OperationalError(Exception):
    """As database drivers call a lost connection."""


class Flaky:
    """Fails so many times before it works."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error = times, error

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return "done"


def test_a_lost_connection_is_tried_again_with_growing_pauses() -> None:
    # GIVEN a storage that is away for three tries
    clock, pauses = FakeClock(), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    # WHEN it is asked patiently
    said = patiently(Flaky(3, OperationalError("gone")), clock=clock, sleep=sleep)

    # THEN it answers in the end
    assert said == "done"
    assert pauses == [0.1, 0.2, 0.4]


def test_patience_ends() -> None:
    # GIVEN a storage that never comes back
    clock = FakeClock()

    # WHEN THEN its own error is raised when the patience is over
    with pytest.raises(OperationalError):
        patiently(Flaky(10**6, OperationalError("gone")), patience_s=30.0, clock=clock, sleep=clock.advance)
    assert 20.0 <= clock() <= 30.0


def test_a_mistake_is_not_tried_again() -> None:
    # GIVEN a call that is wrong
    flaky = Flaky(1, ValueError("a mistake"))

    # WHEN THEN it is raised at once
    with pytest.raises(ValueError, match="a mistake"):
        patiently(flaky)


def test_a_lost_connection_is_known_however_deep_it_is_wrapped() -> None:
    # GIVEN Optuna's own error around the driver's
    wrapped = RuntimeError("storage")
    wrapped.__cause__ = OperationalError("server closed the connection")

    # WHEN THEN
    assert is_connection_loss(wrapped)
    assert not is_connection_loss(RuntimeError("storage"))


def a_ledger(url: str) -> OptunaStudy:
    return OptunaStudy(
        storage=url, name="shared", space=Space(max_workers=8), search="random", seed=0, default_threads=4
    )


HERE, THERE = owner().rpartition(":")[0], "elsewhere"
PARENT = f"{os.getppid()}@{process_start(os.getppid())}"


@pytest.mark.parametrize(
    ("owned_by", "ago_s", "is_run", "state"),
    [
        (f"{THERE}:1@5", 1.0, True, "RUNNING"),
        (f"{THERE}:1@5", LOST_S + 1, False, "RUNNING"),  # of a host that is lost; its clock may be wrong
        (f"{HERE}:{PARENT}", LOST_S + 1, True, "RUNNING"),  # alive, however long it takes
        (f"{HERE}:999999999@5", 1.0, False, "FAIL"),
        (f"{HERE}:{os.getppid()}@0", 1.0, False, "FAIL"),  # another process has its ID now
        (owner(), 1.0, False, "FAIL"),  # of an earlier run in this process
    ],
    ids=["elsewhere", "elsewhere_and_lost", "alive", "ended", "ended_and_its_id_given_again", "an_earlier_run_of_ours"],
)
def test_what_others_run_is_passed_over_and_what_died_is_not(
    tmp_path: Path, owned_by: str, ago_s: float, is_run: bool, state: str
) -> None:
    # GIVEN a running trial of somebody
    url = f"sqlite:///{tmp_path}/study.db"
    theirs = a_ledger(url)
    claim = theirs.ask(LoaderConfig(num_workers=3))
    claim.asked.set_user_attr("owner", owned_by)
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
    first.asked.set_user_attr("owner", "elsewhere:1@5")
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
    import json, sys, time
    from autotune_loader.tuning.finals import Finals
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
    probe = Probe(SimulatedMachine(), clock, seed=int(sys.argv[2]))
    options = TuneOptions(storage=sys.argv[1], search="grid", budget_s=1e6)
    run = simulated_run(probe.machine, Space(max_workers=8), has_step=False)
    search = TuningSession(probe, run, options, clock=clock, started=0.0, listener=Nobody(), study_name="shared")
    Finals.run = lambda *_: None
    found = search.run()
    print("SAID", json.dumps([trial.config.to_dict() for trial in found.trials]), flush=True)
"""


@pytest.mark.system
@pytest.mark.timeout(110)
def test_two_hosts_share_a_study_through_a_restart_of_the_server(server: Server, tmp_path: Path) -> None:
    # GIVEN two processes that take trials of one study, a grid of 33 configurations
    script = tmp_path / "host.py"
    script.write_text(textwrap.dedent(HOST))
    hosts = [
        subprocess.Popen(
            [sys.executable, str(script), server.url, str(seed)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for seed in (0, 1)
    ]  # fmt: skip
    try:
        # WHEN the server crashes in the middle and comes back two seconds later
        assert hosts[0].stdout is not None
        lines = [hosts[0].stdout.readline() for _ in range(4)]
        assert lines[-1].startswith("TRIAL"), "".join(lines + hosts[0].stdout.readlines())
        server.kill()
        time.sleep(2.0)
        server.start()
        output = [host.communicate(timeout=90)[0] for host in hosts]
    finally:
        for host in hosts:
            if host.poll() is None:
                os.kill(host.pid, signal.SIGKILL)
                host.communicate()

    # THEN both went on to the end
    said: list[Any] = []
    for text in output:
        line = next((line for line in text.splitlines() if line.startswith("SAID ")), None)
        assert line is not None, text
        said.append(json.loads(line.removeprefix("SAID ")))

    # AND every configuration was told exactly once, by one of them; neither lost one nor did another's work again
    storage = open_database(server.url)
    study = optuna.load_study(study_name="shared", storage=storage)
    told = [trial for trial in study.get_trials(deepcopy=False) if trial.state == optuna.trial.TrialState.COMPLETE]
    configs = Counter(json.dumps(trial.user_attrs["config"], sort_keys=True) for trial in told)
    expected = {json.dumps(config.to_dict(), sort_keys=True) for config in Space(max_workers=8).configs()}
    assert set(configs) == expected
    assert set(configs.values()) == {1}
    counts = Counter(trial.user_attrs["owner"] for trial in told)
    assert len(counts) == 2, counts
    assert min(counts.values()) >= 3, counts
    storage.remove_session()
    storage.engine.dispose()
