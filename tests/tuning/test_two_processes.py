"""One study in two processes, on SQLite and on PostgreSQL: what the other one runs is passed over; Optuna does the rest."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from autotune_loader.search.space import Space
from autotune_loader.tuning.study import open_study
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import simulated_run, simulated_search

if TYPE_CHECKING:
    from preloaded import PreloadedPython

pytestmark = pytest.mark.system
MACHINE = SimulatedMachine(step_s=0.001)
NAME = "shared"
STANDS_STILL = f"""
import sys, time
from pathlib import Path
sys.path[:0] = {sys.path}
from test_two_processes import search_in

def stand_still(number):
    if number == 2:
        Path("stands-still").touch()
        time.sleep(600)

search_in(sys.argv[1], stand_still)
"""


@contextlib.contextmanager
def study_at(url: str) -> Iterator[optuna.Study]:
    """The study, and its connections closed: Optuna leaves them to the garbage collector, of which psycopg warns."""
    study = open_study(url, NAME)
    try:
        yield study
    finally:
        storage: Any = study._storage
        storage.remove_session()
        storage._backend.engine.dispose()


def search_in(url: str, on_burst: Any = lambda number: None) -> list[LoaderConfig]:
    """Search with the study at this place; what was run here."""

    class Probe(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
            on_burst(len(self.bursts))
            return super().burst(config, plan)

    clock = FakeClock()
    probe = Probe(MACHINE, clock)
    run = simulated_run(MACHINE, Space(max_workers=8), own=LoaderConfig(num_workers=2))
    with study_at(url) as study:
        found = simulated_search(probe, run, clock, study)
        return [each.config for each in found.trials if each.round is None and each.config in probe.bursts]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a database: a file, or a PostgreSQL server of our own, run by somebody who is not root."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/study.db"
        return
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


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    with study_at(url) as study:
        return study.get_trials()


def test_a_second_process_passes_over_what_the_first_one_runs_and_knows_what_it_has_told(
    url: str, tmp_path: Path, preloaded: PreloadedPython
) -> None:
    # GIVEN a process that has told two trials and stands still in its third
    (tmp_path / "host.py").write_text(STANDS_STILL)
    first = preloaded.start("host.py", url, folder=tmp_path)
    try:
        while not (tmp_path / "stands-still").exists():
            assert first.poll() is None, first.output
            time.sleep(0.05)
        before = trials(url)
        assert [each.state.name for each in before] == ["COMPLETE", "COMPLETE", "RUNNING"]

        # WHEN another one searches with the same study
        ran = search_in(url)
    finally:
        first.kill()
        first.wait(timeout=10)

    # THEN it runs neither what was told nor what is running, and the trial of the other one is left to it
    after = trials(url)
    space = Space(max_workers=8)
    theirs = {space.config(each.params).key() for each in before}
    ours = [space.config(each.params).key() for each in after[3:]]
    assert ours
    assert theirs.isdisjoint(ours)
    assert len(set(ours)) == len(ours)
    assert after[2].state.name == "RUNNING"
    assert all(each.state.is_finished() for each in after[3:])
    assert {config.key() for config in ran} >= set(ours)
