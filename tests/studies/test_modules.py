"""Every study says what it asks, can be imported without measuring anything, and its commands exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from studies.libraries.__main__ import MODULES as LIBRARIES
from studies.libraries.environments import ENVIRONMENTS
from studies.libraries.page import rows_by_library

ROOT = Path(__file__).parents[2]
FILES = [path for path in (ROOT / "studies").rglob("*") if path.is_file() and "results" not in path.parts]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in FILES
    if path.suffix == ".py" and path.name != "__init__.py"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module: str) -> None:
    assert importlib.import_module(module).__doc__


def test_the_commands_of_pages_and_scripts_exist_and_no_raw_records_are_kept() -> None:
    assert {path.suffix for path in FILES} <= {".py", ".md", ".sh", ".pyc"}
    texts = [path.read_text() for path in FILES if path.suffix in (".md", ".sh")]
    commands = {command for text in texts for command in re.findall(r"-m (studies(?:\.\w+)+)", text)}
    assert len(commands) > 5
    assert all(importlib.util.find_spec(command) for command in commands), commands


def test_the_kept_table_of_libraries_has_an_explained_row_for_every_attempt() -> None:
    rows = rows_by_library()
    modules = [importlib.import_module(f"studies.libraries.{name}") for name in LIBRARIES]
    attempts = [each.what for module in modules for each in module.ATTEMPTS.values()]

    kept = [line.split(" | ") for lines in rows.values() for line in lines]
    assert set(rows) <= {each.library for each in ENVIRONMENTS}
    assert sorted(what for _, what, *_ in kept) == sorted(attempts)
    assert [row for row in kept if row[2] not in ("tuned", "refused") or len(row[3]) < 5] == []
