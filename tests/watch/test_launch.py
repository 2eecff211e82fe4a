"""A script under `autotune-loader watch` looks the same as under plain Python, whatever ends it."""

import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
WATCH = ("-m", "autotune_loader", "watch")
NOTHING = "\nautotune-loader watch: No PyTorch DataLoader was iterated: nothing to report.\n"

INFO = """
import __main__, os, sys
print(sys.argv, os.path.abspath(sys.path[0]), os.getcwd())
print(__name__, __file__, __package__, __cached__, __doc__)
print(sorted(globals()))
print(__main__.__dict__ is globals(), getattr(__spec__, "name", None))
print(type(__loader__).__name__, type(__builtins__).__name__)
print([path for path in sys.path if "autotune_loader/watch" in path])
print({"torch", "numpy"} & set(sys.modules))
"""
BOOM = """
try:
    {}["x"]
except KeyError as error:
    raise ValueError("bad") from error
"""
SPAWNING = """
import multiprocessing
class Seen(int):
    pass
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(type(pool.apply(Seen, [0])) is Seen)
"""
SCRIPTS = {
    "info.py": INFO,
    "boom.py": BOOM,
    "spawning.py": SPAWNING,
    "three.py": "import sys\nsys.exit(3)",
    "words.py": "raise SystemExit('no data')",
    "syntax.py": "x = (",
    "interrupted.py": (
        "import atexit, signal\natexit.register(print, 'cleaned up')\n"
        "signal.raise_signal(signal.SIGINT)"
    ),
    "ended.py": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)",
    "left.py": "import os\nprint('hi', flush=True)\nos._exit(7)",
    "closed.py": "import sys\nsys.stderr.close()",
    "package/__init__.py": "",
    "package/info.py": INFO,
    "package/__main__.py": "from package.info import __name__ as name\nprint(name)",
    "app/__main__.py": INFO + "import beside\nprint(beside.X)\nsys.exit(3)",
    "app/beside.py": "X = 1",
    "empty/other.py": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    zipapp.create_archive(folder / "app", folder / "app.pyz")
    return folder


def run(folder, *arguments, **environ):
    """Exit code, stdout and stderr."""
    place = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT), **environ}}
    done = subprocess.run(
        [sys.executable, *arguments], **place, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


FILES = ("./info.py", "app.pyz", "app/", "spawning.py", "three.py", "words.py", "empty")
MODULES = ("-m package.info", "-m package", "-m nowhere")
NOT_TOLD = ("closed.py", "left.py", "ended.py", "nowhere.py")


@pytest.mark.parametrize("target", [*FILES, *MODULES, *NOT_TOLD])
def test_a_script_ends_as_under_plain_python(folder, target):
    arguments = [*target.split(), "a", "-o", "--json", "--", "b"]  # they are the script's own
    code, out, err = run(folder, *arguments)
    told = "" if target in NOT_TOLD else NOTHING
    assert run(folder, *WATCH, *arguments) == (code, out, f"{err}{told}")


@pytest.mark.parametrize(
    ("target", "told"), [("boom.py", NOTHING), ("interrupted.py", NOTHING), ("syntax.py", "")]
)
def test_a_traceback_ends_with_the_scripts_own_frames(folder, target, told):
    code, out, err = run(folder, target)
    # `Traceback ... File "x.py", line` of each exception
    own = [each.split("line", 1)[-1] for each in err.split("Traceback (most recent call last):\n")]
    *ended, watched_err = run(folder, *WATCH, target)
    assert ended == [code, out]
    assert [each for each in own if each not in watched_err] == []
    assert watched_err.endswith(f"{own[-1]}{told}")


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
print(len(list(DataLoader(TensorDataset(torch.rand(40, 4)), batch_size=8))))
"""


def test_a_variable_has_unchanged_scripts_watched(folder):
    """A launcher has the command line; interpreters that iterate no loader tell nothing."""
    (folder / "loads.py").write_text(LOADER)
    (folder / "launcher.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'loads.py'], check=True)"
    )
    code, startup, _ = run(folder, "-m", "autotune_loader.watch.startup")
    assert code == 0
    code, out, err = run(
        folder, "launcher.py", PYTHONPATH=startup.strip(), AUTOTUNE_LOADER="watch --json r.json"
    )
    assert (code, out) == (0, "5\n")
    assert err.count("autotune-loader watch: 1 loader in ") == 1
    assert "\nloads.py:4  TensorDataset[40], batches of 8\n" in err
    assert (folder / "r.json").exists()
