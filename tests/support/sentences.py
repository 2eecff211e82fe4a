"""Every text that people read, and words that none of them may have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = [ROOT / "autotune_loader" / room for room in ("diagnosis", "report", "results", "cli", "integrations")]
MODULES = [ROOT / "autotune_loader" / "demo.py", *(path for room in ROOMS for path in room.rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
# Phrases of a private dialect; each was once in a message, and a reader had to ask what it means.
JARGON = (
    *("told of", "heard out", "borne out", "what its seconds hold", "the version of then", "there was time for"),
    *(
        "as they have it",
        "as the twin has it",
        "what is wanted of it",
        "lost, as measured",
        "bears it too",
        "who reads",
    ),
    *("within noise", "takes the fastest", "the least of", "what can be told", "the twin predicts"),
)


def all_texts() -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of every string of the rooms that speak, docstrings included, and of every line of a page."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.lineno, " ".join(node.value.split())
    for path in PAGES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            yield path.name, number, line
