"""Every study says what it asks, can be imported without measuring anything, and its commands exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for path in (ROOT / "studies").rglob("*") if path.is_file() and "results" not in path.parts]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in FILES
    if path.suffix == ".py" and path.name != "__init__.py"
)
PAGES = sorted(path for path in FILES if path.suffix == ".md" and path.name != "results.md")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module: str) -> None:
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + "/" + page.name)
def test_a_page_is_short_and_its_commands_exist(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 80
    commands = set(re.findall(r"-m (studies(?:\.\w+)+)", text))
    assert all(importlib.util.find_spec(command) for command in commands), commands


def test_no_raw_records_are_kept() -> None:
    assert {path.suffix for path in FILES} <= {".py", ".md", ".sh", ".pyc"}
