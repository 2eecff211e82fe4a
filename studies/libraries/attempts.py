"""Does `tune()` work with the loaders and datasets of other libraries, as people use them?

    make libraries                                                   # every attempt; about 20 minutes
    python -m studies libraries.attempts --only litdata,monai        # those of some libraries; the others' rows stay
    python -m studies libraries.attempts --recipes                   # those of docs/frameworks.md that are installed here alone

    environments.py   a virtual environment for each library, over the one that runs this: torch is not installed again
    table.py          the attempts: texts of code
    attempt.py        what a process of its own does with a deadline: tune(), then an epoch by the library

An attempt ends as one of three: tuned, and the configuration applied for an epoch; refused with one sentence that says what to
pass instead; or wrong. `results.md` has a row for each, docs/libraries.md for a library.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from studies.libraries.attempt import Outcome, attempted, attempts_of
from studies.libraries.environments import ENVIRONMENTS, RECIPES, install, python_of
from studies.processes import ROOT, NoAnswerError, answer
from studies.study import Row, Table

# tune() has 10 s; importing a library, and an epoch, may take some more. What takes longer hangs.
DEADLINE_S = 120.0
BAR = "no attempt is wrong"
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
        try:
            given = {"python": python_of(library), "timeout_s": DEADLINE_S, "environ": {"OMP_NUM_THREADS": "1"}}
            made = answer(attempted, **given, library=library, number=number)
        except (NoAnswerError, ValueError) as error:
            made = {"version": "?", "outcome": "wrong", "says": str(error)}
        yield row(library, made.pop("version"), what, Outcome(**made))


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
    """A row for each library, with two calls at most that are tuned as they are, and that are answered with what to try."""
    lines = ["| library | tuned | refused, with what to try |", "|---|---|---|"]
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


def recipe(library: str) -> Row:
    """The test of a recipe in the environment of what it needs."""
    why_not, status = install(library), 1
    if not why_not:
        test = f"tests/integrations/test_recipes.py::test_a_recipe_does_what_it_says[{library}]"
        command = [python_of(library), "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", test]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode
    return Row({"recipe": library, "says": why_not or f"exit status {status}"}, not status)


def rows(*, only: str = "", recipes: bool = False) -> Table:
    if unknown := {*(asked := only.replace(",", " ").split())} - {*ENVIRONMENTS}:
        raise SystemExit(f"{', '.join(unknown)}: try {', '.join(ENVIRONMENTS)}")
    if recipes:
        yield from map(recipe, RECIPES)
        return
    kept = rows_by_library()
    for library in asked or ENVIRONMENTS:
        kept[library] = []
        for line in rows_of(library):
            kept[library].append(line)
            cells = re.split(r" (?<!\\)\| ", line.strip("| "))
            yield Row(dict(zip(("library", "passed", "outcome", "says"), cells, strict=True)), cells[2] != "wrong")
        write(kept)
