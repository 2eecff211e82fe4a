"""The HTML report in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report.example import synthetic_result

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
