"""However a program is started, and however it ends: real processes with hard deadlines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from preloaded import PreloadedPython

from autotune_loader import TuningResult
from autotune_loader.results.loader_file import ENDED

pytestmark = pytest.mark.system

# No `if __name__` guard, classes in the script itself, workers started by the method that the environment names.
SCRIPT = """
import gc, os, signal, sys, time, torch, weakref
from torch.utils.data import DataLoader, Dataset
from autotune_loader import tune

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

class Squares(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.tensor([float(index)]), torch.tensor([index ** 2.0])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x):
        return self.layer(x)

method = os.environ.get("METHOD") or None
loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
result = tune(loader, Net(), output="loader.json", max_workers=1, progress=True,
              budget=float(os.environ.get("BUDGET", "2")), max_trials=int(os.environ.get("TRIALS", "2")))
print("STATUS", result.status, [t.failure.kind if t.failure else "ok" for t in result.trials])
dataset = weakref.ref(loader.dataset)
del loader
gc.collect()
print("KEPT", dataset())
"""
# As those of every program do from Python 3.14 on, unless told otherwise.
FORK_SERVER_SCRIPT = """
import multiprocessing, torch
from autotune_loader import AutoLoader, tune

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index)])

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    result = tune(Squares(), batch_size=4, max_workers=1, budget=2, max_trials=2, progress=False)
    print(result.status, result.fingerprint.start_method, [t.failure.kind if t.failure else "ok" for t in result.trials])
    loader = AutoLoader(Squares(), batch_size=4, shuffle=True, max_workers=2)
    for made in (result.make_loader(Squares(), batch_size=4), loader, loader):
        print("WHOLE", sorted(int(x) for batch in made for x in batch) == list(range(64)))
"""
# `multiprocessing` lets a daemonic process have no children, which the probe and its workers are.
DAEMON_SCRIPT = """
import multiprocessing, torch
from autotune_loader import tune

def work(queue):
    loader = torch.utils.data.DataLoader([torch.zeros(3)] * 64, batch_size=4, num_workers=1)
    first = tune(loader, budget=2, max_trials=1, max_workers=1, progress=False).trials[0]
    queue.put((first.config.num_workers, first.failure))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,), daemon=True)
    process.start()
    print(*queue.get())
"""
DEADLINE_S = 90


def environment(**variables: str) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": package, "PYTHONUNBUFFERED": "1", **variables}


def run_fresh(folder: Path, script: str, *options: str, through_stdin: bool = False) -> str:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *options, "-" if through_stdin else "train.py"],
        cwd=folder, input=script if through_stdin else None, capture_output=True, text=True, timeout=DEADLINE_S,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_without_a_guard_or_a_file_tunes_its_own_dataset_and_keeps_nothing(tmp_path: Path) -> None:
    said = run_fresh(tmp_path, SCRIPT, through_stdin=True)

    assert " ['ok'" in said
    assert "KEPT None" in said
    assert TuningResult.load(tmp_path / "loader.json").status in ENDED


def test_classes_of_the_script_reach_workers_that_are_spawned(tmp_path: Path, preloaded: PreloadedPython) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    run = preloaded.start("train.py", folder=tmp_path, environ=environment(METHOD="spawn"))

    assert run.wait(DEADLINE_S) == 0, run.output
    assert " ['ok'" in run.output


def test_a_program_whose_workers_come_from_a_fork_server_tunes_and_trains(tmp_path: Path) -> None:
    said = run_fresh(tmp_path, FORK_SERVER_SCRIPT, "-W", "error::DeprecationWarning")

    assert said.startswith(("complete forkserver ['ok'", "undecided forkserver ['ok'")), said
    assert said.count("WHOLE True") == 3


def test_a_daemonic_process_may_tune_with_workers(tmp_path: Path) -> None:
    assert run_fresh(tmp_path, DAEMON_SCRIPT).strip() == "1 None"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_the_best_so_far_and_nothing_else(
    tmp_path: Path, preloaded: PreloadedPython, orphaned_segments: Callable[[], set[str]], number: signal.Signals
) -> None:
    # GIVEN a long run that has written its first trial
    before = orphaned_segments()
    (tmp_path / "train.py").write_text(SCRIPT)
    run = preloaded.start("train.py", folder=tmp_path, environ=environment(BUDGET="600", TRIALS="100000"))
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "loader.json").exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    assert run.poll() is None, run.output
    members = psutil.Process(run.pid).children(recursive=True)
    assert members, "the probe process runs"

    os.kill(run.pid, number)

    # THEN Ctrl-C returns what there is; and either way file and machine are in order
    assert run.wait(timeout=20) == (0 if number == signal.SIGINT else -number), run.output
    assert ("STATUS partial" in run.output) == (number == signal.SIGINT)
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"
    _, alive = psutil.wait_procs(members, timeout=5)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    assert number == signal.SIGKILL or orphaned_segments() <= before
