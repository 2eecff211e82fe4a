"""No sentence that people read has a word that a newcomer must look up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = [ROOT / "autotune_loader" / room for room in ("report", "results", "cli", "integrations")]
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


def texts(path: Path) -> Iterator[str]:
    """Lines of a page, or the strings of a module, docstrings included."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from text.splitlines()
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def test_no_sentence_has_a_word_that_a_newcomer_must_look_up() -> None:
    said = [(path, text) for path in (*MODULES, *PAGES) for text in texts(path)]
    assert [(path.name, text) for path, text in said if any(word in text.lower() for word in JARGON)] == []
