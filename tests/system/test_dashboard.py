"""optuna-dashboard opens the journal that a tuning run leaves, as it is, in a real browser."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from autotune_loader import tune

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [name for name, there in (("optuna_dashboard", importlib.util.find_spec("optuna_dashboard")),) if not there]

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(MISSING) or CHROMIUM is None, reason="needs optuna-dashboard and chromium"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_the_dashboard_shows_the_study_of_a_journal(tmp_path: Path) -> None:
    # GIVEN the journal of a tuning run
    data = torch.utils.data.TensorDataset(torch.rand(128, 8), torch.randint(0, 2, (128,)))
    journal = tmp_path / "study.journal"
    brief = {"budget": 3, "max_trials": 3, "max_workers": 1, "isolation": "inline", "progress": False}
    result = tune(data, torch.nn.Linear(8, 2), batch_size=16, storage=journal, **brief)
    assert result.study is not None

    # WHEN the dashboard opens it and a browser opens the dashboard
    port = free_port()
    serve = f"from optuna_dashboard._cli import main; import sys; sys.argv[1:] = [{str(journal)!r}, '--port', '{port}']; main()"
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/dashboard")
        command = [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-dev-shm-usage", "--virtual-time-budget=15000", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--dump-dom", f"http://127.0.0.1:{port}/dashboard/studies/0/trials"),
        ]
        opened = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        server.terminate()
        server.wait(timeout=10)

    # THEN study and trials are on the page
    assert result.study.study_name in opened.stdout
    assert "Trial 0" in opened.stdout
