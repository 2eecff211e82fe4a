"""Make every attempt, each in a process of its own with a deadline; `results.md` has a row for each, the docs for a library."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from studies.libraries.attempt import Outcome, attempts_of
from studies.libraries.environments import ENVIRONMENTS, install, python_of
from studies.processes import ROOT, NoAnswerError, last_line

# tune() has 10 s; importing a library, and an epoch, may take some more. What takes longer hangs.
DEADLINE_S = 120.0
RESULTS, PAGE = Path(__file__).with_name("results.md"), ROOT / "docs" / "libraries.md"
BEGIN, END = "<!-- studies.libraries -->", "<!-- end -->"
HEAD = "| library | passed to `tune()` | outcome | what it says |\n|---|---|---|---|\n"
# Notes of a result that are about the loader, and not about the step or the machine.
ABOUT_LOADERS = ("data=", "the dataset makes", "how many samples", "every worker")


def rows_of(library: str) -> Iterator[str]:
    """Make the attempts of a library; a row for each."""
    if why_not := install(library):
        yield row(library, "-", "-", Outcome("not tried", why_not))
        return
    for number, (what, _) in enumerate(attempts_of(library)[1]):
        command = "-m", "studies.libraries.attempt", library, str(number)
        try:
            line = last_line(*command, python=python_of(library), timeout_s=DEADLINE_S, OMP_NUM_THREADS="1")
            answer = json.loads(line)
        except (NoAnswerError, json.JSONDecodeError) as error:
            answer = {"version": "?", "outcome": "wrong", "says": str(error)}
        yield row(library, answer.pop("version"), what, Outcome(**answer))


def row(library: str, version: str, what: str, found: Outcome) -> str:
    notes = [note for note in found.notes if note.startswith(ABOUT_LOADERS) or "of its own" in note]
    says = "<br>".join(map(_escaped, (found.says, *notes)))
    return f"| {library} {version} | {_escaped(what)} | {found.outcome} | {says} |"


def _escaped(text: str) -> str:
    """Fit for a cell: no address of an object, no bar, no tag."""
    return re.sub(r" at 0x?[0-9a-f]*", "", text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def rows_by_library() -> dict[str, list[str]]:
    """The rows that are kept, by the library's name."""
    rows: dict[str, list[str]] = {}
    for line in RESULTS.read_text().splitlines()[2:]:
        rows.setdefault(line.split("|")[1].split()[0], []).append(line)
    return rows


def summary(kept: dict[str, list[str]]) -> str:
    """A row for each library, with two calls at most that are tuned as they are, and that are answered with what would work."""
    lines = ["| library | tuned | refused, with what would work |", "|---|---|---|"]
    for rows in kept.values():
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]
        tuned, refused = ([cell[1] for cell in cells if cell[2] == outcome][:2] for outcome in ("tuned", "refused"))
        lines.append(f"| {cells[0][0]} | {'; '.join(tuned)} | {'; '.join(refused)} |")
    return "\n".join(lines)


def write(kept: dict[str, list[str]]) -> None:
    """Both tables, with the libraries in the order of `ENVIRONMENTS`."""
    kept = {library: kept[library] for library in ENVIRONMENTS if library in kept}
    RESULTS.write_text(HEAD + "".join(f"{line}\n" for rows in kept.values() for line in rows))
    whole = PAGE.read_text(encoding="utf-8")
    before, after = whole.partition(BEGIN)[0], whole.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{summary(kept)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    asked = sys.argv[1:]
    if unknown := set(asked) - set(ENVIRONMENTS):
        raise SystemExit(f"{', '.join(unknown)}: one of {', '.join(ENVIRONMENTS)} would work")
    kept = rows_by_library()
    for library in asked or ENVIRONMENTS:
        kept[library] = []
        for line in rows_of(library):
            print(line, flush=True)
            kept[library].append(line)
        write(kept)
    rows = [line for lines in kept.values() for line in lines]
    wrong = sum("| wrong |" in line for line in rows)
    print(f"{len(rows)} rows, {wrong} wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
