"""Small versions of `studies/endurance`: killed again and again, and trial after trial in trouble."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import PreloadedPython, Run

from studies.endurance import kills

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]


def study(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_killed_at_any_moment_is_resumed_and_its_file_loads(
    tmp_path: Path, preloaded: PreloadedPython, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Five short runs, each of which would otherwise begin with importing torch.
    (tmp_path / "run.py").write_text(kills.RUN.replace("budget=4", "budget=2"))

    def start(folder: Path) -> Run:
        environ = {"PYTHONPATH": str(ROOT), kills.MARK: str(folder)}
        return preloaded.start(str(tmp_path / "run.py"), folder=folder, environ=environ)

    monkeypatch.setattr(kills, "start", start)
    monkeypatch.setattr(sys, "argv", ["kills", "--kills", "2", "--seed", "5"])

    assert kills.main() == 0

    figures = {line[:20].strip(): int(line[20:]) for line in capsys.readouterr().out.splitlines()}
    assert figures["kills"] == 2
    assert figures["leftover processes"] == 0


def test_trial_after_trial_in_trouble_leaves_nothing_and_loses_nothing() -> None:
    said = study("studies.endurance", "--trials", "12", "--seed", "3")

    for what in ("hangs", "leftovers", "lost studies", "studies not well at end", "escaped exceptions"):
        line = next(line for line in said.splitlines() if line.startswith(what))
        assert line.removeprefix(what).split()[0] == "0", said
