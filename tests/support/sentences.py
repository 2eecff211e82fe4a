"""Every sentence that the package can say, and words that no sentence may have: `python -m tests.support.sentences`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("report", "results", "cli", "integrations", "demo.py")
JARGON = (
    "told of",
    "heard out",
    "borne out",
    "what its seconds hold",
    "the version of then",
    "there was time for",
    "as they have it",
    "as the twin has it",
    "what is wanted of it",
    "lost, as measured",
    "bears it too",
    "who reads",
    "within noise",
    "takes the fastest",
    "the least of",
    "what can be told",
    "the twin predicts",
)
"""Phrases of a private dialect; each was once in a message, and a reader had to ask what it means."""


def sentences(room: str) -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of every text of a room, docstrings included; `{}` stands for what is filled in."""
    place = ROOT / "autotune_loader" / room
    for path in [place] if place.suffix else sorted(place.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if len(text.split()) > 1:
                yield path.relative_to(ROOT).as_posix(), node.lineno, " ".join(text.split())


def pages() -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of README, changelog and documentation."""
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            yield path.relative_to(ROOT).as_posix(), number, line


def all_texts() -> Iterator[tuple[str, int, str]]:
    for room in ROOMS:
        yield from sentences(room)
    yield from pages()


if __name__ == "__main__":
    for file, line, text in all_texts():
        sys.stdout.write(f"{file}:{line}: {text}\n")
