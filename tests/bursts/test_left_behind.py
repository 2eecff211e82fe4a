"""Nothing of ours stays, however a run ends; places that are hard to begin in are no trouble."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

# A run in the midst of a burst, and a program that its dataset has started in a worker. It says
# which processes these are, that of the bursts first.
RUNNING = """
import contextlib, os, subprocess, sys, threading, time, psutil, torch
from dataclasses import replace
from autotune_loader.values import BurstPlan
from tests.support.bursts import ONE_WORKER, opened, workload

class Rows:
    lock = program = None
    def __len__(self): return 1 << 20
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            self.program = self.program or subprocess.Popen(["sleep", "1000"]).pid
        time.sleep(0.001)
        if os.path.exists("stop"): raise EOFError
        return torch.zeros(4)

def tell(first):
    names = []
    while "sleep" not in names:
        time.sleep(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            children = psutil.Process().children(recursive=True)
            names = [each.name() for each in children]
    print(first, *[each.pid for each in children], file=open("processes", "w"), flush=True)
    open("told", "w").close()

if __name__ == "__main__":
    rows, method = Rows(), None
    if sys.argv[1] == "forked":
        rows.lock, method = threading.Lock(), "fork"
    with opened(workload(rows, multiprocessing_context=method)) as probe:
        threading.Thread(target=tell, args=[probe.probe._child.pid]).start()
        start = "spawn" if sys.argv[1] == "cloned" else None
        config = replace(ONE_WORKER, multiprocessing_context=start)
        plan = BurstPlan(max_s=60.0, min_s=60.0, relative_error=1e-9, deadline_s=90.0, anew=False)
        probe.probe.burst(config, plan)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.py").write_text(RUNNING)
    return tmp_path


@pytest.fixture
def environ():
    with tempfile.TemporaryDirectory() as short:  # with a long one, scratch would be elsewhere
        yield {"TMPDIR": short, "OMP_NUM_THREADS": "1"}


def wait_until(holds, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def semaphores_of(names):
    return [each for name in names for each in Path("/dev/shm").glob(f"sem.{name}*")]


def assert_nothing_stays(job, folder, scratch, victim, has_spawned=False):
    wait_until((folder / "told").exists)
    probe, *others = map(int, (folder / "processes").read_text().split())
    processes = [psutil.Process(pid) for pid in others if psutil.pid_exists(pid)]
    # GIVEN that the dataset's own program belongs to them WHEN one is killed
    assert "sleep" in [each.name() for each in processes]
    names = [each.name for each in scratch.iterdir()]
    assert names
    # AND spawned workers have semaphores
    assert semaphores_of(names) or not has_spawned
    os.kill(job.pid if victim == "parent" else probe, signal.SIGKILL)
    (folder / "stop").touch()
    job.wait(timeout=60)

    def are_gone():
        living = [each for each in processes if each.is_running() and each.status() != "zombie"]
        return not (living or [*scratch.iterdir()] or semaphores_of(names))

    # THEN no process, no folder and no semaphore stays
    wait_until(are_gone, 15.0)


@pytest.mark.process
@pytest.mark.parametrize(("kind", "victim"), [
    ("fresh", "parent"), ("forked", "parent"), ("cloned", "parent"), ("cloned", "child"),
])  # fmt: skip
def test_after_kill_9_nothing_stays(kind, victim, folder, environ, preloaded):
    job = preloaded.start("job.py", kind, folder=folder, environ=environ, probes=True)
    assert_nothing_stays(job, folder, Path(environ["TMPDIR"]), victim, has_spawned=kind == "cloned")


@pytest.mark.system
def test_after_kill_9_of_plain_pythons_nothing_stays(folder, environ):
    """Which import torch themselves, and whose probe has no other parent."""
    path = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, **environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "job.py", "fresh"], cwd=folder, env=environ) as job:
        assert_nothing_stays(job, folder, Path(environ["TMPDIR"]), "parent")


HARD = """
import os, signal, torch
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload
if __name__ == "__main__":
    os.close(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    before = os.listdir("/proc/self/fd")
    with opened(workload([torch.zeros(4)] * 4096)) as probe:
        for config in (ONE_WORKER, TWO_WORKERS):
            measured(probe.probe, config)
        assert not [note for note in probe.notes if "fork" in note]
        assert os.path.exists("/proc/self/fd/0")
    assert os.listdir("/proc/self/fd") == before
"""


@pytest.mark.process
def test_a_hard_place_is_no_trouble(tmp_path, preloaded):
    # GIVEN no standard input, whose number the next descriptor would get, ignored ends of children,
    # and a folder with a name too long for sockets
    long = tmp_path / "job_4711.".ljust(90 - len(str(tmp_path)), "x")
    long.mkdir()
    (tmp_path / "job.py").write_text(HARD)
    job = preloaded.start("job.py", folder=tmp_path, environ={"TMPDIR": str(long)}, probes=True)
    assert job.wait(timeout=100) == 0, job.output
    assert list(long.iterdir()) == []
