"""One study that others have open, too, on SQLite and on PostgreSQL: what they run is passed over; Optuna does the rest."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune_loader.search.space import Space
from autotune_loader.tuning.study import open_study
from autotune_loader.values.config import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import simulated_run, simulated_search

pytestmark = pytest.mark.system
MACHINE = SimulatedMachine(step_s=0.001)
SPACE = Space(max_workers=8)


@contextlib.contextmanager
def study_at(url: str) -> Iterator[optuna.Study]:
    """The study, and its connections closed: Optuna leaves them to the garbage collector, of which psycopg warns."""
    study = open_study(url, "shared")
    try:
        yield study
    finally:
        storage: Any = study._storage
        storage.remove_session()
        storage._backend.engine.dispose()


def search_in(study: optuna.Study, **given: Any) -> None:
    clock = FakeClock()
    run = simulated_run(MACHINE, SPACE, own=LoaderConfig(num_workers=2))
    simulated_search(SimulatedProbe(MACHINE, clock), run, clock, study, **given)


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


def test_what_others_run_is_passed_over_and_what_they_have_told_is_known(url: str) -> None:
    with study_at(url) as theirs, study_at(url) as ours:
        # GIVEN another host that has told some trials, and stands still in one more
        search_in(theirs, budget_s=6.0)
        SPACE.suggest(theirs.ask())
        before = theirs.get_trials()
        assert [each.state.name for each in before[-2:]] == ["COMPLETE", "RUNNING"]
        # WHEN the same job is tuned with the same study
        search_in(ours)
        after = ours.get_trials()
    # THEN nothing runs twice, and the trial of the other one is left to it
    keys = [SPACE.config(each.params).key() for each in after]
    assert len(set(keys)) == len(keys) > len(before)
    assert [each.state.name for each in after].count("RUNNING") == 1
