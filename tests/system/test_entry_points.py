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
from tests.support.bursts import segments

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
# No `if __name__` guard, classes in the script itself, workers started as the environment says.
SCRIPT = f"""{HEAD}
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin with it ignored
method = os.environ.get("METHOD")
loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
study = open_study("study.journal")
result = tune(loader, torch.nn.Linear(1, 1), study=study, output="loader.json", **SHORT)
print("STATUS", result.status, outcomes(result))
dataset = weakref.ref(loader.dataset)
del loader
gc.collect()
print("KEPT", dataset())
"""
# As those of every program do from Python 3.14 on, unless told otherwise.
FORK_SERVER = f"""{HEAD}
if __name__ == "__main__":
    warnings.simplefilter("error", DeprecationWarning)
    multiprocessing.set_start_method("forkserver")
    result = tune(Squares(), batch_size=4, progress=False, **SHORT)
    print("STATUS", outcomes(result))
    loader = AutoLoader(Squares(), batch_size=4, shuffle=True, max_workers=2)
    for made in (result.make_loader(Squares(), batch_size=4), loader, loader):
        print("WHOLE", sorted(int(each) for x, _ in made for each in x) == list(range(64)))
"""
ENVIRON = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}


def test_a_program_without_a_file_keeps_nothing(tmp_path):
    """The one that begins in a Python that has imported nothing."""
    how = {"cwd": tmp_path, "env": {**os.environ, **ENVIRON}, "timeout": DEADLINE_S}
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, **how
    )
    assert done.returncode == 0, done.stderr
    assert "'ok'" in done.stdout
    assert "KEPT None" in done.stdout
    assert TuningResult.load(tmp_path / "loader.json").status in ("complete", "undecided")


@pytest.mark.parametrize(
    ("script", "method", "epochs"),
    [
        pytest.param(SCRIPT, "spawn", 0, id="spawned workers"),
        pytest.param(FORK_SERVER, "forkserver", 3, id="workers of a fork server"),
    ],
)
def test_a_script_tunes_and_trains_with(script, method, epochs, tmp_path, preloaded):
    environ = {**ENVIRON, "METHOD": method}
    output = preloaded.ran(script, folder=tmp_path, environ=environ, probes=True)
    assert "'ok'" in output
    assert output.count("WHOLE True") == epochs


def test_ctrl_c_returns_the_best_and_leaves_nothing(tmp_path, preloaded):
    # GIVEN a run that has told its first trial, and whose probe runs
    journal, before = tmp_path / "study.journal", segments()
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**ENVIRON, "BUDGET": "600"}
    run = preloaded.start("train.py", folder=tmp_path, environ=environ, probes=True)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and run.poll() is None:
        members = psutil.Process(run.pid).children(recursive=True)
        if members[1:] and journal.exists() and "samples_per_s" in journal.read_text():
            break
        time.sleep(0.02)
    # WHEN Ctrl-C is typed
    assert run.poll() is None, run.output
    os.kill(run.pid, signal.SIGINT)
    # THEN what is best so far is returned and written
    assert run.wait(timeout=20) == 0, run.output
    assert "STATUS partial" in run.output
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"
    # AND neither a process nor shared memory is left
    _, alive = psutil.wait_procs(members, timeout=5)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    own = {str(each.pid) for each in members} | {str(run.pid)}
    assert [name for name in segments() - before if name.split("_")[1] in own] == []


# A container of docker's has 64 MiB of /dev/shm: here it is mounted so for one process.
CONTAINED = """
import ctypes, os, sys
import torch
from torch.utils.data import DataLoader
from autotune_loader import AutoLoader
from tests.support.data import Rows

libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
if libc.unshare(0x10020000):  # users and mounts of its own
    sys.exit("nothing may be mounted here")
maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
for name, text in maps.items():
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m"):
    sys.exit("nothing may be mounted here")
data = Rows(lambda index: torch.full((32 << 20,), index, dtype=torch.uint8), 8)
loader = {"DataLoader": DataLoader, "AutoLoader": AutoLoader}[sys.argv[1]]
print([batch[0, -1].item() for batch in loader(data, num_workers=2)])
"""


@pytest.mark.smoke
def test_autoloader_gives_what_shared_memory_cannot_hold(tmp_path, preloaded):
    theirs = preloaded.ran(CONTAINED, "DataLoader", folder=tmp_path, code=1)
    if "nothing may be mounted here" in theirs:
        pytest.skip("nothing may be mounted here")
    ours = preloaded.ran(CONTAINED, "AutoLoader", folder=tmp_path)
    assert ours.strip() == str(list(range(8)))
