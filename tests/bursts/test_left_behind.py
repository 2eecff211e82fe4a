"""Nothing of ours stays, however a run ends; and places where a run is hard to begin are no trouble."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process
ENVIRON = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "OMP_NUM_THREADS": "1",
}

# A run in the midst of a burst with workers, and a program that its dataset has started. It says which processes these are.
RUNNING = """
import subprocess, sys, threading, time, psutil, torch
from dataclasses import replace
from autotune_loader.values import BurstPlan
from tests.support.bursts import ONE_WORKER, opened, workload

class Rows:
    lock = program = None
    def __len__(self): return 1 << 20
    def __getitem__(self, index):
        self.program = self.program or subprocess.Popen(["sleep", "1000"]).pid
        time.sleep(0.001)
        return torch.zeros(4)

def tell():
    children = []
    while "sleep" not in [each.name() for each in children]:
        time.sleep(1.0)
        children = psutil.Process().children(recursive=True)
    print(*[each.pid for each in children], flush=True)

if __name__ == "__main__":
    rows, method = Rows(), None
    if sys.argv[1] == "forked":
        rows.lock, method = threading.Lock(), "fork"
    with opened(workload(rows, multiprocessing_context=method)) as probe:
        threading.Thread(target=tell).start()
        config = replace(ONE_WORKER, multiprocessing_context="spawn" if sys.argv[1] == "cloned" else None)
        plan = BurstPlan(max_s=20.0, min_s=20.0, relative_error=1e-9, deadline_s=90.0, anew=False)
        probe.probe.burst(config, plan)
"""


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("fresh", "parent"),
        ("forked", "parent"),
        ("cloned", "parent"),
        ("fresh", "child"),
        ("cloned", "child"),
    ],
)
def test_after_kill_9_no_process_and_no_folder_stays(kind, victim, tmp_path):
    (tmp_path / "job.py").write_text(RUNNING)
    (tmp_path / "tmp").mkdir()
    environ = {**ENVIRON, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "job.py", kind]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as job:
        pids = [int(word) for word in job.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert "sleep" in [each.name() for each in processes], (
            "the dataset's own program belongs to them"
        )
        ours = [
            each
            for each in processes
            if each.ppid() == job.pid and "AFTER" not in str(each.cmdline())
        ]
        os.kill(
            job.pid if victim == "parent" else max(ours, key=lambda each: len(each.children())).pid,
            signal.SIGKILL,
        )
        job.wait(timeout=60)
    deadline, left = time.monotonic() + 15.0, True
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        living = [each for each in processes if each.is_running() and each.status() != "zombie"]
        left = [*living, *(tmp_path / "tmp").iterdir()]
    assert not left


HARD = """
import os, signal, torch
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload
if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    before = os.listdir("/proc/self/fd")
    with opened(workload([torch.zeros(4)] * 4096)) as probe:
        for config in (ONE_WORKER, TWO_WORKERS):
            measured(probe.probe, config)
        print("fine", [note for note in probe.notes if "fork" in note], os.path.exists("/proc/self/fd/0"))
    print(os.listdir("/proc/self/fd") == before)
"""


def test_a_place_that_is_hard_to_begin_in_is_no_trouble(tmp_path):
    # GIVEN no standard input, whose number the next descriptor would get, ignored ends of children, and a folder with a name
    # too long for sockets
    long = tmp_path / "job_4711.".ljust(90 - len(str(tmp_path)), "x")
    long.mkdir()
    (tmp_path / "job.py").write_text(HARD)
    command, environ = (
        ["sh", "-c", f"exec {sys.executable} job.py <&-"],
        {**ENVIRON, "TMPDIR": str(long)},
    )
    ran = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.stdout.splitlines() == ["fine [] True", "True"], ran.stderr
    assert list(long.iterdir()) == []
