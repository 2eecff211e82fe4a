"""What is left when a whole tuning run is killed with SIGKILL at a random moment?

    python -m studies endurance.kills --kills 50

A run with `output=` is killed, every second time the process of its bursts instead. Then no process and no file of it may be
left but `loader.json`, which must load where it is there, and a run after it must end well.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from autotune_loader import TuningResult
from autotune_loader.values import TunerError
from studies.processes import ROOT
from studies.study import Row, Table

MARK, DEADLINE_S = "AUTOTUNE_ENDURANCE", 120.0
RUN = """
import time, torch
from autotune_loader import tune

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((3,), float(index))

tune(Rows(), batch_size=8, budget=4, max_workers=2, output="loader.json", progress=False)
"""
FIGURES = ("kills", "of the bursts' process", "before first file", "after the end", "unreadable files", "not finished")
LEFT = ("leftover processes", "leftover files")
BAR = "no unreadable file, none not finished, nothing left"


def rows(*, kills: int = 50, seed: int = 0) -> Table:
    figures = kill_runs(kills, seed)
    for name in (*FIGURES, *LEFT):
        is_fault = name in ("unreadable files", "not finished", *LEFT)
        yield Row({"figure": name, "times": figures[name]}, not figures[name] if is_fault else None)


def kill_runs(kills: int, seed: int = 0) -> Counter[str]:
    """Kill that many runs, each at a moment drawn from the whole length of a run."""
    rng, figures, begun = random.Random(seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        wait(start(Path(folder)))
    whole_s = time.monotonic() - begun
    for number in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            kill_one(Path(folder), rng.uniform(0.1, 1.0) * whole_s, kills_child=number % 2 > 0, figures=figures)
        print(f"{number + 1} kills: {figures}", file=sys.stderr)
    return figures


def kill_one(folder: Path, after_s: float, *, kills_child: bool, figures: Counter[str]) -> None:
    process, path = start(folder), folder / "loader.json"
    try:
        process.wait(after_s)
        figures["after the end"] += 1
    except subprocess.TimeoutExpired:
        victim = child_of(process.pid) if kills_child else None
        figures["of the bursts' process"] += victim is not None
        with contextlib.suppress(psutil.Error):
            (victim or psutil.Process(process.pid)).kill()
    wait(process)
    figures["kills"] += 1
    note_left(folder, figures)
    figures["before first file"] += not path.exists()
    figures["unreadable files"] += path.exists() and not status_of(path)
    wait(start(folder))
    figures["not finished"] += status_of(path) not in ("complete", "undecided")
    note_left(folder, figures)


def status_of(path: Path) -> str:
    """Of the result in a file; empty where there is none, or none that can be read."""
    with contextlib.suppress(TunerError, FileNotFoundError):
        return str(TuningResult.load(path).status)
    return ""


def child_of(pid: int) -> psutil.Process | None:
    """The process of the bursts, which leads a session of its own and has imported torch; None while there is none."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children()
        return next((each for each in children if "bursts.child" in " ".join(each.cmdline())), None)
    return None


def note_left(folder: Path, figures: Counter[str]) -> None:
    figures["leftover processes"] += len(still_there(str(folder)))
    figures["leftover files"] += len([path for path in folder.iterdir() if path.name != "loader.json"])


def start(folder: Path) -> Any:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", RUN], cwd=folder, env={**os.environ, **environ(folder)}, **quiet)


def environ(folder: Path) -> dict[str, str]:
    """With temporary files where each that is left is seen."""
    return {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), MARK: str(folder)}


def wait(process: Any) -> None:
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def still_there(mark: str, within_s: float = 5.0) -> list[int]:
    """Processes of a killed run that live on."""
    deadline = time.monotonic() + within_s
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    found.append(process.pid)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
