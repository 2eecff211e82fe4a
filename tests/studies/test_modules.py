"""Every study says what it asks, can be imported without measuring anything, and its commands answer `--help`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "studies").rglob("*.py")
    if path.name != "__init__.py"
)
PAGES = sorted((ROOT / "studies").rglob("*.md"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module: str) -> None:
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "results.md"], ids=str)
def test_a_page_is_short_and_its_commands_exist(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 80
    commands = set(re.findall(r"-m (studies(?:\.\w+)+)", text))
    assert all(importlib.util.find_spec(command) for command in commands), commands


def test_no_raw_records_are_kept() -> None:
    kept = {path.suffix for path in (ROOT / "studies").rglob("*") if path.is_file() and "results" not in path.parts}
    assert kept <= {".py", ".md", ".sh", ".pyc"}
