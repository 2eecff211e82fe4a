"""What the layers of import-linter do not say: a door knows little of the house, and a name stands for one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "autotune_loader"
DOORS = ("cli", "integrations", "watch")
MOST_MODULES, MOST_NAMES = 12, 25


def inner_names() -> set[tuple[str, str]]:
    """(module, name) of everything that the doors import from rooms below, also inside of functions.

    The public names of the package are what everybody may use.
    """
    found = set()
    for path in (path for door in DOORS for path in (PACKAGE / door).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autotune_loader."):
                room = str(node.module).split(".")[1]
                if room not in DOORS:
                    found |= {(str(node.module), each.name) for each in node.names}
    return found


def test_the_doors_name_few_modules_and_few_names_of_inner_rooms() -> None:
    names = inner_names()
    modules = {module for module, _ in names}
    assert len(modules) <= MOST_MODULES, sorted(modules)
    assert len({name for _, name in names}) <= MOST_NAMES, sorted(names)


# Names that still stand for two things; none may be added.
TWICE = {"arguments.py", "comparison.py", "Comparison", "Run"}


def test_a_file_name_and_a_class_name_stand_for_one_thing() -> None:
    paths = list(PACKAGE.rglob("*.py"))
    classes = [
        each.name for path in paths for each in ast.walk(ast.parse(path.read_text())) if type(each) is ast.ClassDef
    ]
    files = [path.name for path in paths if path.name != "__init__.py"]
    assert {name for name, count in Counter(files + classes).items() if count > 1} <= TWICE


def test_the_files_that_contributing_names_exist() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", text))
    assert len(named) > 20
    assert [each for each in named if not (PACKAGE / each).exists() and not (PACKAGE.parent / each).exists()] == []
