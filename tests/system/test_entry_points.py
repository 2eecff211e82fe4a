"""However a program is started, and however it ends: real processes with hard deadlines."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune_loader import TuningResult

pytestmark = pytest.mark.system

DEADLINE_S = 90
HEAD = """
import gc, multiprocessing, os, signal, time, torch, warnings, weakref
from torch.utils.data import DataLoader, Dataset
from autotune_loader import AutoLoader, tune
from autotune_loader.tuning.study import open_study

class Squares(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.tensor([float(index)]), torch.tensor([index ** 2.0])

SHORT = dict(max_workers=1, budget=float(os.environ.get("BUDGET", 2)))

def outcomes(result):
    return [trial.failure.kind if trial.failure else "ok" for trial in result.trials]
"""
# No `if __name__` guard, classes in the script itself, workers started by the method that the environment names.
SCRIPT = f"""{HEAD}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=os.environ.get("METHOD"))
study = open_study("study.journal")
result = tune(loader, torch.nn.Linear(1, 1), study=study, output="loader.json", progress=True, **SHORT)
print("STATUS", result.status, outcomes(result))
dataset = weakref.ref(loader.dataset)
del loader
gc.collect()
print("KEPT", dataset())
"""
# As those of every program do from Python 3.14 on, unless told otherwise.
FORK_SERVER_SCRIPT = f"""{HEAD}
if __name__ == "__main__":
    warnings.simplefilter("error", DeprecationWarning)
    multiprocessing.set_start_method("forkserver")
    result = tune(Squares(), batch_size=4, progress=False, **SHORT)
    print("STATUS", multiprocessing.get_start_method(), outcomes(result))
    loader = AutoLoader(Squares(), batch_size=4, shuffle=True, max_workers=2)
    for made in (result.make_loader(Squares(), batch_size=4), loader, loader):
        print("WHOLE", sorted(int(each) for x, _ in made for each in x) == list(range(64)))
"""
ENVIRON = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}


def test_a_program_without_a_file_tunes_its_own_dataset_and_keeps_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, cwd=tmp_path, env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " ['ok'" in done.stdout
    assert "KEPT None" in done.stdout
    assert TuningResult.load(tmp_path / "loader.json").status in ("complete", "undecided")


@pytest.mark.parametrize(
    ("script", "method", "says", "epochs"),
    [
        (SCRIPT, "spawn", "['ok'", 0),
        (FORK_SERVER_SCRIPT, "", "STATUS forkserver ['ok'", 3),
    ],
    ids=["spawned workers", "workers of a fork server"],
)
def test_a_script_tunes_and_trains_with(script, method, says, epochs, tmp_path, preloaded):
    (tmp_path / "train.py").write_text(script)
    run = preloaded.start("train.py", folder=tmp_path, environ={**ENVIRON, "METHOD": method})
    assert run.wait(DEADLINE_S) == 0, run.output
    assert says in run.output
    assert run.output.count("WHOLE True") == epochs


def test_ctrl_c_returns_the_best_so_far_and_leaves_nothing(tmp_path, preloaded):
    # GIVEN a run that has told its first trial
    journal = tmp_path / "study.journal"
    (tmp_path / "train.py").write_text(SCRIPT)
    run = preloaded.start("train.py", folder=tmp_path, environ={**ENVIRON, "BUDGET": "600"})
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and not (
        journal.exists() and "samples_per_s" in journal.read_text()
    ):
        time.sleep(0.02)
    time.sleep(0.3)  # the trial is told, and the next burst runs
    assert run.poll() is None, run.output
    members = psutil.Process(run.pid).children(recursive=True)
    assert members, "the probe process runs"
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(timeout=20) == 0, run.output
    assert "STATUS partial" in run.output
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"
    _, alive = psutil.wait_procs(members, timeout=5)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    own = {str(each) for each in (run.pid, *(member.pid for member in members))}
    assert [
        path.name for path in Path("/dev/shm").glob("torch_*") if path.name.split("_")[1] in own
    ] == []
