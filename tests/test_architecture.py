"""The architecture page says what the code is: rooms as their packages say, walks through functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autotune_loader"
PAGE = (ROOT / "docs/explanation/architecture.md").read_text()


def floors() -> list[list[str]]:
    """Rooms by floor, the lowest first, as import-linter checks them."""
    layers = re.search(r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert layers is not None
    return [[room.strip() for room in layer.split("|")] for layer in reversed(ast.literal_eval(layers[1]))]


def first_sentence(room: str) -> str:
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert docstring is not None
    line = " ".join(docstring.split("\n\n")[0].split())
    return re.match(r".*?\.(?= |$)(?<!e\.g\.)", line)[0]


def test_the_table_of_rooms_is_made_of_their_docstrings_and_stands_on_their_floors() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room for _, room, _ in rows} == packages
    for _, room, sentence in rows:
        assert sentence == first_sentence(room), room
    drawn = [{room for at, room, _ in rows if at == floor} for floor in sorted({at for at, *_ in rows}, key=int)]
    checked = [set(layer) & packages for layer in floors()]
    assert drawn == [layer for layer in checked if layer]


STEPS = re.findall(r"^\d+\. `([\w/]+\.py)` `(\w+)`", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), STEPS, ids=lambda part: part)
def test_every_step_of_a_walk_exists(file: str, name: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
