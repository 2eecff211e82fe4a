"""Studies can be imported without measuring anything, their commands exist, their table is whole."""

import importlib
import re
from pathlib import Path

import pytest

from studies.libraries.__main__ import rows_by_library
from studies.libraries.attempt import attempts_of
from studies.libraries.environments import ENVIRONMENTS
from studies.libraries.table import LIBRARIES

ROOT = Path(__file__).parents[2]
FILES = [
    path for path in (ROOT / "studies").rglob("*") if path.is_file() and "results" not in path.parts
]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if path.suffix == ".py"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module):
    assert importlib.import_module(module).__doc__


def test_the_commands_of_pages_and_scripts_exist_and_no_raw_records_are_kept():
    assert {path.suffix for path in FILES} <= {".py", ".md", ".sh", ".pyc"}
    texts = [path.read_text() for path in FILES if path.suffix in (".md", ".sh")]
    commands = {
        command for text in texts for command in re.findall(r"-m (studies(?:\.\w+)+)", text)
    }
    assert len(commands) > 5
    assert all(importlib.util.find_spec(command) for command in commands), commands


def test_the_kept_table_of_libraries_has_an_explained_row_for_every_library():
    rows = rows_by_library()
    assert list(rows) == list(ENVIRONMENTS)
    assert list(rows) == list(LIBRARIES)
    kept = [line.split(" | ") for lines in rows.values() for line in lines]
    assert [row for row in kept if row[2] not in ("tuned", "refused") or len(row[3]) < 5] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_attempts_with_a_library_are_code_and_those_of_the_table(library):
    things, attempts = attempts_of(library)
    compile(things, library, "exec")
    assert [compile(job, library, "eval") for _, job in attempts]
    kept = [line.split(" | ")[1] for line in rows_by_library()[library]]
    assert [what for what, _ in attempts] == kept
