"""Nothing of ours stays, however a run ends; and places where a run is hard to begin are no trouble."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from autotune_loader.bursts.loop import OpenLoader
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, Made, measured, opened, workload

pytestmark = pytest.mark.process
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}

# A run in the midst of a burst with workers, and a program that its dataset has started. It says which processes these are.
RUNNING = """
import subprocess, sys, threading, time, psutil, torch
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
    time.sleep(1.0)
    print(*[each.pid for each in psutil.Process().children(recursive=True)], flush=True)

if __name__ == "__main__":
    rows = Rows()
    rows.lock = threading.Lock() if sys.argv[1] == "forked" else None
    with opened(workload(rows)) as probe:
        threading.Thread(target=tell).start()
        probe.probe.burst(ONE_WORKER, BurstPlan(max_s=60.0, min_s=60.0, relative_error=1e-9, deadline_s=90.0))
"""


@pytest.mark.parametrize("kind", ["fresh", "forked"])
@pytest.mark.parametrize("victim", ["parent", "child"])
def test_after_kill_9_no_process_and_no_folder_stays(kind, victim, tmp_path):
    (tmp_path / "job.py").write_text(RUNNING)
    (tmp_path / "tmp").mkdir()
    environ = {**ENVIRON, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "job.py", kind]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as job:
        pids = [int(word) for word in job.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert "sleep" in [each.name() for each in processes], "the dataset's own program belongs to them"
        ours = [each for each in processes if each.ppid() == job.pid and "AFTER" not in str(each.cmdline())]
        os.kill(job.pid if victim == "parent" else max(ours, key=lambda each: len(each.children())).pid, signal.SIGKILL)
        job.wait(timeout=60)
    deadline, left = time.monotonic() + 15.0, True
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        living = [each for each in processes if each.is_running() and each.status() != "zombie"]
        left = [*living, *(tmp_path / "tmp").iterdir()]
    assert not left


HARD = """
import os, signal, sys, torch
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload
if __name__ == "__main__":
    if sys.argv[1] == "ends of children ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with opened(workload([torch.zeros(4)] * 4096)) as probe:
        for config in (ONE_WORKER, TWO_WORKERS):
            measured(probe.probe, config)
        print("fine", [note for note in probe.notes if "fork" in note], os.path.exists("/proc/self/fd/0"))
    print(os.path.exists("/proc/self/fd/0"))
"""


@pytest.mark.parametrize("place", ["no standard input", "long TMPDIR", "ends of children ignored"])
def test_a_place_that_is_hard_to_begin_in_is_no_trouble(place, tmp_path):
    # GIVEN no standard input, whose number the next descriptor would get, or a folder with a name too long for sockets
    long = tmp_path / "job_4711.".ljust(90 - len(str(tmp_path)), "x")
    long.mkdir()
    (tmp_path / "job.py").write_text(HARD)
    closes = place == "no standard input"
    command = ["sh", "-c", f"exec {sys.executable} job.py '{place}' {'<&-' if closes else ''}"]
    environ = ENVIRON if closes else {**ENVIRON, "TMPDIR": str(long)}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout.splitlines() == ["fine [] True", str(not closes)], ran.stderr
    assert list(long.iterdir()) == []


def rows(slow=None):
    """In workers, one sample may take long."""
    read = itertools.count(1)

    def make(index):
        time.sleep(30.0 if next(read) == slow and get_worker_info() is not None else 0.001)
        return torch.zeros(4)

    return Made(make, 4096)


MIB = 1 << 20


def test_workers_of_50_mib_each_are_reported_to_10_percent_and_their_start_apart():
    plan, held = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=60.0), []
    # Both are opened before either is measured: what is in both, such as torch's libraries, counts by halves in each.
    with (
        opened(workload(rows(), 8, worker_init_fn=lambda worker: held.append(b"x" * (50 * MIB)))) as holding,
        opened(workload(rows(), 8, worker_init_fn=lambda worker: time.sleep(0.5))) as plain,
    ):
        for config in (ONE_WORKER, TWO_WORKERS):
            large, small = (measured(each.probe, config, plan) for each in (holding, plain))
            # THEN memory is that of the workers, which live while it is read, with shared pages counted once each too
            for name in ("pss_bytes", "rss_bytes"):
                more = getattr(large.memory, name) - getattr(small.memory, name)
                assert more == pytest.approx(config.num_workers * 50 * MIB, rel=0.1)
            # THEN the start of workers, which is once an epoch, is no part of the rate
            assert small.first_batch_s > 0.5
            assert small.samples / small.samples_per_s.value < 0.5


def test_workers_end_at_once_at_the_end_of_a_burst():
    # GIVEN workers that are at a slow sample when a burst with a slow step ends
    plan = BurstPlan(max_s=0.02, min_s=0.01, relative_error=0.9, deadline_s=60.0)
    slow = TrainingSide(train_step=lambda model, batch: time.sleep(0.03))
    with opened(workload(rows(slow=6), 1, training=slow)) as probe:
        begun = time.monotonic()
        measured(probe.probe, TWO_WORKERS, plan)
        assert time.monotonic() - begun < 10.0


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_the_pinning_thread_has_ended_when_workers_are_killed(monkeypatch):
    killed = []
    with OpenLoader() as open_loader:
        iterator = open_loader.open(DataLoader(range(1 << 20), num_workers=2))
        # GIVEN a thread on the workers' queue, as torch has it where there is a GPU
        results, ended = iterator._worker_result_queue, threading.Event()
        pinning = threading.Thread(
            target=lambda: list(iter(lambda: ended.is_set() or results.get(), True)), daemon=True
        )
        iterator._pin_memory_thread, iterator._pin_memory_thread_done_event = pinning, ended
        pinning.start()
        monkeypatch.setattr(BaseProcess, "kill", lambda each: killed.append(pinning.is_alive()) or each.terminate())
    assert killed == [False, False]
