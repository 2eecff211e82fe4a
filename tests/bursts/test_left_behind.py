"""Nothing of ours stays, however a run ends; and places where a run is hard to begin are no trouble."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.bursts import parent
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 15.0
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def wait_until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


# A run in the midst of a burst with workers, and a program that its dataset has started. It says which processes these are.
RUNNING = """
import os, subprocess, sys, threading, time, psutil, torch
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ONE_WORKER, opened, workload

class Rows:
    def __init__(self):
        self.lock = threading.Lock() if sys.argv[1] == "forked" else None
        self.program = None
    def __len__(self): return 1 << 20
    def __getitem__(self, index):
        if self.program is None:
            self.program = subprocess.Popen(["sleep", "1000"]).pid
        time.sleep(0.001)
        return torch.zeros(4)

if __name__ == "__main__":
    with opened(workload(Rows())) as probe:
        def tell():
            time.sleep(1.0)
            print(*[each.pid for each in psutil.Process().children(recursive=True)], flush=True)
        threading.Thread(target=tell).start()
        probe.probe.burst(ONE_WORKER, BurstPlan(max_s=60.0, min_s=60.0, relative_error=1e-9, deadline_s=90.0))
"""


@pytest.mark.parametrize("kind", ["fresh", "forked"])
@pytest.mark.parametrize("victim", ["parent", "child"])
def test_after_kill_9_no_process_and_no_folder_stays(kind: str, victim: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RUNNING)
    (tmp_path / "tmp").mkdir()
    environ = {**ENVIRON, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        [sys.executable, "job.py", kind], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        pids = [int(word) for word in job.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        programs = [each for each in processes if each.name() == "sleep"]
        assert programs, "the dataset's own program belongs to them"
        # WHEN one is killed in the midst of a burst
        ours = [each for each in processes if each.ppid() == job.pid and b"AFTER" not in str(each.cmdline()).encode()]
        os.kill(job.pid if victim == "parent" else max(ours, key=lambda each: len(each.children())).pid, signal.SIGKILL)
        job.wait(timeout=60)
    # THEN all that was started ends, and the temporary folder is empty
    assert wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in processes))
    assert wait_until(lambda: not list((tmp_path / "tmp").iterdir()))


def test_a_process_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_more(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(parent.subprocess, "Popen", no_more)
    descriptors = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(BlockingIOError), opened(workload(torch.zeros(8, 4))):
        pass
    assert not list(tmp_path.iterdir())
    assert set(Path("/proc/self/fd").iterdir()) == descriptors


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.zeros(4)


# Standard input closed, whose number the next descriptor would get; a temporary folder whose name is too long for sockets.
HARD = """
import os, sys, torch
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload
class Rows:
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.zeros(4)
if __name__ == "__main__":
    with opened(workload(Rows())) as probe:
        for config in (ONE_WORKER, TWO_WORKERS):
            measured(probe.probe, config)
        print("fine", [note for note in probe.notes if "fork" in note], os.path.exists("/proc/self/fd/0"))
    print(os.path.exists("/proc/self/fd/0"))
"""


@pytest.mark.parametrize("place", ["no standard input", "long TMPDIR"])
def test_a_place_that_is_hard_to_begin_in_is_no_trouble(place: str, tmp_path: Path) -> None:
    long = tmp_path / "job_4711.".ljust(90 - len(str(tmp_path)), "x")
    long.mkdir()
    (tmp_path / "job.py").write_text(HARD)
    closes = place == "no standard input"
    command = ["sh", "-c", f"exec {sys.executable} job.py {'<&-' if closes else ''}"]
    environ = ENVIRON if closes else {**ENVIRON, "TMPDIR": str(long)}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout.splitlines() == ["fine [] True", str(not closes)], ran.stderr
    assert list(long.iterdir()) == []


HELD: list[bytes] = []
MIB = 1 << 20


def hold_50_mib(worker: int) -> None:
    HELD.append(b"x" * (50 * MIB))


def nap(worker: int) -> None:
    time.sleep(0.5)


def test_workers_of_50_mib_each_are_reported_to_10_percent_and_their_start_apart() -> None:
    plan = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=60.0)
    with (
        opened(workload(Rows(), 8, worker_init_fn=hold_50_mib)) as holding,
        # opened before either is measured: what is in both, such as torch's libraries, counts by halves in each
        opened(workload(Rows(), 8, worker_init_fn=nap)) as plain,
    ):
        for config in (ONE_WORKER, TWO_WORKERS):
            large, small = (measured(each.probe, config, plan) for each in (holding, plain))
            assert large.memory is not None
            assert small.memory is not None
            # THEN memory is that of the workers, which live while it is read, with shared pages counted once each too
            for name in ("pss_bytes", "rss_bytes"):
                more = getattr(large.memory, name) - getattr(small.memory, name)
                assert more == pytest.approx(config.num_workers * 50 * MIB, rel=0.1)
            # THEN the start of workers, which is once an epoch, is no part of the rate
            assert small.first_batch_s > 0.5
            assert small.samples / small.samples_per_s.value < 0.5


class Stuck(Rows):
    """A worker's sixth sample takes long: it is at that when a burst with a slow step ends."""

    read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        if torch.utils.data.get_worker_info() is not None and self.read == 6:
            time.sleep(30.0)
        return torch.zeros(4)


def test_workers_end_at_once_at_the_end_of_a_burst() -> None:
    plan = BurstPlan(max_s=0.02, min_s=0.01, relative_error=0.9, deadline_s=60.0)
    slow = TrainingSide(train_step=lambda model, batch: time.sleep(0.03))
    with opened(workload(Stuck(), 1, training=slow)) as probe:
        begun = time.monotonic()
        measured(probe.probe, TWO_WORKERS, plan)
        assert time.monotonic() - begun < 10.0
