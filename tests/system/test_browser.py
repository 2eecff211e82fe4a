"""In a real browser: the HTML report, and optuna-dashboard on the journal that a tuning run leaves, as it is."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from report.example import synthetic_result

from autotune_loader import tune
from autotune_loader.report.page import render_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; apt-get install chromium would do"),
]


def browse(folder: Path, url: str) -> tuple[str, list[str]]:
    """What a browser without a screen makes of a page, and what it complains of."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=15000"),
        *(f"--user-data-dir={folder / 'profile'}", "--dump-dom", url),
    ]
    opened = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return opened.stdout, re.findall(r".*CONSOLE.*", opened.stderr)


def test_the_report_is_shown_whole_with_every_picture_and_without_a_complaint(tmp_path: Path) -> None:
    # GIVEN the report, and a copy with a script that asks each picture for its size; the report's own policy allows none
    text = render_html(synthetic_result())
    script = "<script>onload=()=>{document.title=[...document.images].map(i=>i.naturalWidth>100).join()}</script>"
    measuring = re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", f"{script}</body>")
    for name, page in (("report.html", text), ("measuring.html", measuring)):
        (tmp_path / name).write_text(page, encoding="utf-8")

    shown, complaints = browse(tmp_path, (tmp_path / "report.html").as_uri())
    measured, _ = browse(tmp_path, (tmp_path / "measuring.html").as_uri())

    assert "<title>DataLoader tuning report</title>" in shown
    assert "Measured configurations" in shown
    assert complaints == []
    assert f"<title>{','.join(['true'] * 4)}</title>" in measured


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_the_dashboard_shows_the_study_of_a_journal(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard")
    # GIVEN the journal of a tuning run
    data = torch.utils.data.TensorDataset(torch.rand(128, 8), torch.randint(0, 2, (128,)))
    journal = str(tmp_path / "study.journal")
    result = tune(
        data, torch.nn.Linear(8, 2), batch_size=16, storage=journal, budget=3, max_trials=3, max_workers=1,
        isolation="inline", progress=False,
    )  # fmt: skip
    assert result.study is not None

    # WHEN the dashboard opens it and a browser opens the dashboard
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    serve = f"from optuna_dashboard._cli import main; import sys; sys.argv[1:] = {[journal, '--port', port]!r}; main()"
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline, is_there = time.monotonic() + 30.0, False
        while not is_there and time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/dashboard", timeout=2).close()
                is_there = True
        shown, _ = browse(tmp_path, f"http://127.0.0.1:{port}/dashboard/studies/0/trials")
    finally:
        server.terminate()
        server.wait(timeout=10)

    # THEN study and trials are on the page
    assert result.study.study_name in shown
    assert "Trial 0" in shown
