"""The HTML report in a real browser. Chromium is not installed by the tests: where there is none, they are skipped."""

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


def browse(folder: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page without a screen, in a profile of its own that is thrown away."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=5000"),
        *(f"--user-data-dir={folder / 'profile'}", *options, url),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(synthetic_result()), encoding="utf-8")
    return path


def test_the_report_is_shown_whole_and_without_a_complaint(page: Path, tmp_path: Path) -> None:
    # WHEN the page is opened and what the browser made of it is written out
    opened = browse(tmp_path, page.as_uri(), "--dump-dom")

    # THEN title, table and every picture are there, and neither the page nor its policy complains
    assert "<title>DataLoader tuning report</title>" in opened.stdout
    assert opened.stdout.count("data:image/svg+xml;base64,") == 7
    assert "What was tried" in opened.stdout
    assert re.findall(r".*CONSOLE.*", opened.stderr) == []


def test_every_picture_of_the_report_is_drawn(page: Path, tmp_path: Path) -> None:
    # GIVEN the report, with a script that asks each picture for its size; the report's own policy allows no script
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    script = "<script>onload=()=>{document.title=[...document.images].map(i=>i.naturalWidth>100).join()}</script>"
    measuring = tmp_path / "measuring.html"
    measuring.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")

    opened = browse(tmp_path, measuring.as_uri(), "--dump-dom")

    assert f"<title>{','.join(['true'] * 7)}</title>" in opened.stdout
