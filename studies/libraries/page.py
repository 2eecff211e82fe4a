"""What the attempts came to: `results.md` with a row for each, and the page of the documentation with one for each library."""

from __future__ import annotations

import re
from pathlib import Path

from studies.libraries.attempt import Outcome

RESULTS = Path(__file__).with_name("results.md")
PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
BEGIN, END = "<!-- studies.libraries -->", "<!-- end -->"
HEAD = "| library | passed to `tune()` | outcome | what it says |\n|---|---|---|---|\n"
# Notes of a result that are about the loader, and not about the step or the machine.
ABOUT_LOADERS = ("dataset_or_loader=", "the dataset makes", "how many samples", "every worker")


def table() -> str:
    """The whole table, in Markdown."""
    return RESULTS.read_text()


def write_page() -> None:
    """The page of the documentation with what is in `results.md` now."""
    whole = PAGE.read_text(encoding="utf-8")
    before, after = whole.partition(BEGIN)[0], whole.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{summary()}\n{END}{after}", encoding="utf-8")


def summary() -> str:
    """A row for each library, with two calls at most that are tuned as they are, and that are answered with what would work."""
    lines = ["| library | tuned | refused, with what would work |", "|---|---|---|"]
    for rows in rows_by_library().values():
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]
        found = {outcome: [cell[1] for cell in cells if cell[2] == outcome][:2] for outcome in ("tuned", "refused")}
        lines.append(f"| {cells[0][0]} | {'; '.join(found['tuned'])} | {'; '.join(found['refused'])} |")
    return "\n".join(lines)


def rows_by_library() -> dict[str, list[str]]:
    """The rows that are kept, by the library's name."""
    rows: dict[str, list[str]] = {}
    for line in table().splitlines()[2:] if RESULTS.exists() else ():
        rows.setdefault(line.split("|")[1].split()[0], []).append(line)
    return rows


def row(each: Outcome) -> str:
    name = each.library if each.outcome == "not tried" else f"{each.library} {each.version}"
    says = f"`{each.config}`" if each.config and each.outcome == "tuned" else _escaped(each.sentence)
    about_loader = [note for note in each.notes if note.startswith(ABOUT_LOADERS) or "of its own" in note]
    says += "".join(f"<br>{_escaped(note)}" for note in about_loader)
    return f"| {name} | {_escaped(each.what)} | {each.outcome} | {says} |"


def _escaped(text: str) -> str:
    """Fit for a cell: no address of an object, no bar, no tag."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text).replace("|", "\\|").replace("\n", " ")
    return text.replace("<br>", "\0").replace("<", "&lt;").replace("\0", "<br>")
