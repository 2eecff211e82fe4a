"""Is anything lost when a whole tuning run is killed with SIGKILL at a random moment?

    python -m studies.endurance.kills --kills 50

A run with `output=` and a study in a journal is killed. Then `loader.json`, where there is one, must load, and a second run
must take up every trial that the study knew and come to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from autotune_loader import LoaderConfig, load_config
from autotune_loader.search.sampler import read_record
from autotune_loader.tuning.study import open_study
from autotune_loader.values.errors import TunerError

ROOT = Path(__file__).resolve().parents[2]
MARK = "AUTOTUNE_ENDURANCE"
RUN = """
import logging, sys, time, torch
from autotune_loader import tune
from autotune_loader.tuning.study import open_study
logging.basicConfig(level=logging.INFO)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((3,), float(index))

tune(Rows(), batch_size=8, budget=4, max_workers=2, output="loader.json", study=open_study("study.journal"), progress=False)
"""
DEADLINE_S = 120.0
LEFT_FILES = re.compile(r"loader\.json|study\.journal|.*\.journal\.lock.*|\.loader\.json\..*\.tmp")


FIGURES = (
    *("kills", "after the end", "unreadable files", "not finished", "lost trials", "resumed runs"),
    *("resumed trials", "leftover processes", "temporary files"),
)
Figures = Counter[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = kill_runs(options.kills, options.seed)
    for name in FIGURES:
        print(f"{name:<20} {figures[name]}")
    return 1 if any(figures[name] for name in ("unreadable files", "not finished", "lost trials")) else 0


def kill_runs(kills: int, seed: int = 0) -> Figures:
    """Kill that many runs, each at a moment drawn from the whole length of a run."""
    rng, figures = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        finish(Path(folder))
        whole_s = time.monotonic() - begun
    for number in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            kill_one(Path(folder), rng.uniform(0.2, 1.0) * whole_s, figures)
        print(f"{number + 1} kills: {figures}", file=sys.stderr)
    return figures


def kill_one(folder: Path, after_s: float, figures: Figures) -> None:
    process = start(folder)
    try:
        process.wait(after_s)
        figures["after the end"] += 1
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    process.communicate()
    figures["kills"] += 1
    figures["leftover processes"] += len(still_there(str(folder)))
    path = folder / "loader.json"
    if path.exists():
        try:
            load_config(path, on_mismatch="strict")
        except TunerError as error:
            print(error, file=sys.stderr)
            figures["unreadable files"] += 1
    known = trials_of(folder)
    finish(folder)
    resumed = known & trials_of(folder)
    figures["resumed runs"] += len(resumed) > 0
    figures["resumed trials"] += len(resumed)
    figures["lost trials"] += len(known - resumed)
    figures["not finished"] += not is_complete(folder / "loader.json")
    figures["leftover processes"] += len(still_there(str(folder)))
    figures["temporary files"] += len(list(folder.glob(".loader.json.*")))
    unknown = [path.name for path in folder.iterdir() if not LEFT_FILES.fullmatch(path.name)]
    assert not unknown, unknown


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ(folder)},
    )


def environ(folder: Path) -> dict[str, str]:
    """With temporary files where each that is left is seen."""
    return {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), MARK: str(folder)}


def finish(folder: Path) -> None:
    """Run to the end."""
    process = start(folder)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0]
    if process.returncode:
        print(output, file=sys.stderr)


def trials_of(folder: Path) -> set[tuple[LoaderConfig, float]]:
    """Those that the study has been told: each by what it ran, and the seconds that it took."""
    records = [read_record(each) for each in open_study(str(folder / "study.journal")).get_trials()]
    return {(each.config, each.seconds) for each in records if each is not None}


def is_complete(path: Path) -> bool:
    return path.exists() and json.loads(path.read_text())["status"] in ("complete", "undecided")


def still_there(mark: str, within_s: float = 5.0) -> list[int]:
    """Processes of a killed run that live on."""
    deadline = time.monotonic() + within_s
    while (
        found := [each.pid for each in psutil.process_iter() if is_marked(each, mark)]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
