"""A script under `autotune-loader watch` beside the same script under plain Python: whatever ends it, both look the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NOTHING = "\nautotune-loader watch: Nothing can be told: no PyTorch DataLoader gave a batch."

INFO = """
import __main__, os, sys
print(sys.argv, sys.path[0], os.getcwd(), __name__, __file__, __package__, __cached__, __doc__, sorted(globals()))
print(__main__.__dict__ is globals(), getattr(__spec__, "name", None), type(__loader__).__name__, type(__builtins__).__name__)
print([path for path in sys.path if "autotune_loader/scripts" in path])
"""
BOOM = """
def fail():
    raise KeyError("x")
try:
    fail()
except KeyError as error:
    raise ValueError("bad") from error
"""
HOOKED = """
import sys, traceback
def show(kind, error, frames):
    print(kind, error, [each.name for each in traceback.extract_tb(frames)])
print(sys.excepthook is sys.__excepthook__)
sys.excepthook = show
def fail():
    raise KeyError("x")
fail()
"""
SPAWNING = """
import multiprocessing
class Seen:
    pass
def see(_):
    return Seen()
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(type(pool.apply(see, [0])) is Seen)
"""
SCRIPTS = {
    "info.py": INFO,
    "boom.py": BOOM,
    "hooked.py": HOOKED,
    "spawning.py": SPAWNING,
    "beside/its_own.py": "import statistics\nprint(statistics.MINE)",
    "beside/statistics.py": "MINE = 'my own'",
    "three.py": "import sys\nsys.exit(3)",
    "words.py": "import sys\nsys.exit('no such data')",
    "syntax.py": "x = (",
    "interrupted.py": "import signal\nsignal.raise_signal(signal.SIGINT)",
    "ended.py": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)",
    "left.py": "import os\nprint('hi', flush=True)\nos._exit(7)",
    "package/__init__.py": "",
    "package/__main__.py": INFO,
    "package/info.py": INFO,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "target",
    [
        ["info.py"],
        ["./info.py"],
        ["-m", "package"],
        ["-m", "package.info"],
        ["boom.py"],
        ["hooked.py"],
        ["spawning.py"],
        ["beside/its_own.py"],
        ["three.py"],
        ["words.py"],
        ["interrupted.py"],
    ],
    ids=" ".join,
)
def test_a_script_runs_and_ends_as_under_plain_python(folder: Path, target: list[str]) -> None:
    arguments = [*target, "a", "-o", "--json", "--", "b"]  # they are the script's own
    code, out, err = run(folder, *arguments)

    watched = run(folder, "-m", "autotune_loader", "watch", *arguments)

    assert watched == (code, out, f"{err}{NOTHING}\n")


@pytest.mark.parametrize("target", [["syntax.py"], ["nowhere.py"], ["-m", "nowhere"], ["ended.py"]], ids=" ".join)
def test_what_does_not_begin_or_is_killed_looks_the_same(folder: Path, target: list[str]) -> None:
    assert run(folder, "-m", "autotune_loader", "watch", *target) == run(folder, *target)


def test_the_end_by_sigint_is_python_s_own(folder: Path) -> None:
    assert run(folder, "-m", "autotune_loader", "watch", "interrupted.py")[0] == -signal.SIGINT


def test_os_exit_is_told_of(folder: Path) -> None:
    code, out, err = run(folder, "-m", "autotune_loader", "watch", "left.py")

    assert (code, out) == (7, "hi\n")
    assert err == f"{NOTHING} The script ended by os._exit(7).\n"


def test_a_script_finds_no_torch_and_no_line_of_ours_in_its_log(folder: Path) -> None:
    text = "import logging, sys\nassert not {'torch', 'numpy'} & set(sys.modules)\nlogging.basicConfig(level=logging.DEBUG)"
    (folder / "without.py").write_text(f"{text}\nlogging.getLogger('autotune_loader.machine').debug('ours')")

    assert run(folder, "-m", "autotune_loader", "watch", "without.py") == (0, "", f"{NOTHING}\n")
