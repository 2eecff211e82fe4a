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
from preloaded import PreloadedPython, Run

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
DEADLINE_S = 90


def environment(**variables: str) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": package, "PYTHONUNBUFFERED": "1", **variables}


def run_fresh(arguments: list[str], folder: Path, text: str | None = None, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(**variables),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TuningResult.load(folder / "loader.json").status in ENDED
    return done.stdout


def test_a_script_without_a_guard_tunes_its_own_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    said = run_fresh(["train.py"], tmp_path)

    assert " ['ok'" in said
    assert "KEPT None" in said


def test_classes_of_the_script_reach_workers_that_are_spawned(tmp_path: Path, preloaded: PreloadedPython) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    run = preloaded.start("train.py", folder=tmp_path, environ=environment(METHOD="spawn"))

    assert run.wait(DEADLINE_S) == 0, run.output
    assert " ['ok'" in run.output
    assert TuningResult.load(tmp_path / "loader.json").status in ENDED


def test_the_same_through_standard_input(tmp_path: Path) -> None:
    assert " ['ok'" in run_fresh(["-"], tmp_path, text=SCRIPT)


def test_the_same_in_a_notebook_cell(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT)])
    nbformat.write(notebook, tmp_path / "train.ipynb")
    execute = (
        "import nbformat, nbclient; book = nbformat.read('train.ipynb', 4); "
        "nbclient.NotebookClient(book, timeout=60, kernel_name='python3').execute(); "
        "print(''.join(o.get('text', '') for o in book.cells[0].outputs))"
    )

    assert " ['ok'" in run_fresh(["-c", execute], tmp_path)


def started_and_measuring(folder: Path, python: PreloadedPython) -> Run:
    """A long run that has written its first trial."""
    (folder / "train.py").write_text(SCRIPT)
    run = python.start("train.py", folder=folder, environ=environment(BUDGET="600", TRIALS="100000"))
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "loader.json").exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    assert run.poll() is None, run.output
    return run


def family(run: Run) -> list[psutil.Process]:
    members = psutil.Process(run.pid).children(recursive=True)
    assert members, "the probe process runs"
    return members


def assert_all_gone(members: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(members, timeout=within_s)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_ctrl_c_returns_and_writes_the_best_so_far_and_leaves_nothing(
    tmp_path: Path, preloaded: PreloadedPython, orphaned_segments: Callable[[], set[str]]
) -> None:
    before = orphaned_segments()
    run = started_and_measuring(tmp_path, preloaded)
    members = family(run)

    os.kill(run.pid, signal.SIGINT)

    assert run.wait(timeout=20) == 0, run.output
    assert "STATUS partial" in run.output
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"
    assert_all_gone(members, within_s=5)
    assert orphaned_segments() <= before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_parent_is_killed_everything_goes_and_the_file_loads(
    tmp_path: Path, preloaded: PreloadedPython, number: signal.Signals
) -> None:
    run = started_and_measuring(tmp_path, preloaded)
    members = family(run)

    os.kill(run.pid, number)

    assert run.wait(timeout=20) == -number
    assert_all_gone(members, within_s=5)
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"


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


def test_a_program_whose_workers_come_from_a_fork_server_tunes_and_trains(tmp_path: Path) -> None:
    """As those of every program do from Python 3.14 on, unless told otherwise."""
    (tmp_path / "train.py").write_text(FORK_SERVER_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("complete forkserver ['ok'", "undecided forkserver ['ok'")), done.stdout
    assert done.stdout.count("WHOLE True") == 3


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


def test_a_daemonic_process_may_tune_with_workers(tmp_path: Path) -> None:
    """`multiprocessing` lets a daemonic process have no children, which the probe and its workers are."""
    (tmp_path / "train.py").write_text(DAEMON_SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1 None"
