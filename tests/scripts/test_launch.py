"""A script under `autotune-loader watch` beside the same script under plain Python: whatever ends it, both look the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
WATCH = ("-m", "autotune_loader", "watch")
NOTHING = "\nautotune-loader watch: Nothing can be told: no PyTorch DataLoader gave a batch."

INFO = """
import __main__, os, sys
print(sys.argv, sys.path[0], os.getcwd(), __name__, __file__, __package__, __cached__, __doc__, sorted(globals()))
print(__main__.__dict__ is globals(), getattr(__spec__, "name", None), type(__loader__).__name__, type(__builtins__).__name__)
print([path for path in sys.path if "autotune_loader/scripts" in path], {"torch", "numpy"} & set(sys.modules))
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
print(sys.excepthook is sys.__excepthook__)
sys.excepthook = lambda kind, error, frames: print(kind, error, [each.name for each in traceback.extract_tb(frames)])
1 / 0
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
    "hooked.py": HOOKED,
    "spawning.py": SPAWNING,
    "beside/its_own.py": "import statistics\nprint(statistics.MINE)",
    "beside/statistics.py": "MINE = 'my own'",
    "three.py": "import sys\nsys.exit(3)",
    "syntax.py": "x = (",
    "interrupted.py": "import signal\nsignal.raise_signal(signal.SIGINT)",
    "ended.py": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)",
    "left.py": "import os\nprint('hi', flush=True)\nos._exit(7)",
    "package/__init__.py": "",
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
        [sys.executable, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("./info.py", f"{NOTHING}\n"),
        ("-m package.info", f"{NOTHING}\n"),
        ("boom.py", f"{NOTHING}\n"),
        ("hooked.py", f"{NOTHING}\n"),
        ("spawning.py", f"{NOTHING}\n"),
        ("beside/its_own.py", f"{NOTHING}\n"),
        ("three.py", f"{NOTHING}\n"),
        ("interrupted.py", f"{NOTHING}\n"),
        ("left.py", f"{NOTHING} The script ended by os._exit(7).\n"),
        ("syntax.py", ""),
        ("-m nowhere", ""),
        ("ended.py", ""),
    ],
)
def test_a_script_runs_and_ends_as_under_plain_python(folder: Path, target: str, told: str) -> None:
    arguments = [*target.split(), "a", "-o", "--json", "--", "b"]  # they are the script's own
    code, out, err = run(folder, *arguments)

    assert run(folder, *WATCH, *arguments) == (code, out, f"{err}{told}")
