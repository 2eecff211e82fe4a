"""The twin on data that it has never seen: sustained runs of 20 s, each beside the bursts that are to predict it.

    python -m studies.fidelity.fresh --lock /tmp/quiet.lock     # about 21 minutes; stop and continue it at will
    python -m studies.fidelity.fresh --report                   # the tables again; also writes the first into README.md

The machine's speed changes over minutes by more than the twin is meant to err. So every workload is visited twice, at
random moments; a visit measures the step's ceiling, the bursts and three sustained runs in random order, within about 80 s.
Predictions from the bursts of the same visit tell the twin's error, those from the other visit that and the drift. One
configuration is run in both visits: how well one run of 20 s predicts another. All of this was fixed before the first run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from studies.fidelity.analysis import Cell, by_workload, cells, load, rows, worst
from studies.fidelity.grid import WORKLOAD_NAMES, Task
from studies.fidelity.marks import write
from studies.fidelity.measure import measure
from studies.fidelity.records import RESULTS
from studies.quiet import QuietTurns

FILES = {
    "scout": RESULTS / "fresh_scouts.jsonl.gz",
    "ceiling": RESULTS / "fresh_sustained.jsonl",
    "sustained": RESULTS / "fresh_sustained.jsonl",
}
SECONDS = 20.0
SCOUTS = (0, 1, 4, 12)
"""Three of them make a fit; 0 workers only for the other choices."""
DESIGN = (1, 4, 12)
OTHER_DESIGNS = ((0, 4, 12), (0, 1, 4))
ANCHOR = (4, 2)
VISITS = (((2, 4), (8, 8), ANCHOR), ((6, 2), (12, 4), ANCHOR))
"""Workers and prefetch of the sustained runs of each visit."""


def tasks(order: int = 20261121) -> list[Task]:
    """Everything, visit after visit."""
    rng = random.Random(order)
    visits = [_visit(name, number) for name in WORKLOAD_NAMES for number in range(len(VISITS))]
    rng.shuffle(visits)
    for visit in visits:
        rng.shuffle(visit)
    return [task for visit in visits for task in visit]


def _visit(name: str, number: int) -> list[Task]:
    design = [("scout", workers, 2 if workers else None) for workers in SCOUTS]
    runs = [("sustained", *cell) for cell in VISITS[number]]
    return [
        Task(workload=name, kind=kind, num_workers=workers, prefetch_factor=prefetch, repeat=number)  # type: ignore[arg-type]
        for kind, workers, prefetch in [("ceiling", 0, None), *design, *runs]
    ]


def report() -> str:
    """The tables; the README has the first of them."""
    raw = load(FILES)
    found = cells(raw, DESIGN)
    near, far = _by_visit(found)
    parts = [
        f"{len(raw.sustained)} runs of {SECONDS:g} s; a fit has one burst each at {DESIGN} workers, prefetch 2.",
        "Bursts of the same visit, within about 80 s of the run (the twin's error):",
        by_workload(near),
        "Bursts of the other visit, minutes away (the twin's error and the machine's drift):",
        by_workload(far),
        "One 20 s run against the other of the same configuration (4 workers, prefetch 2), minutes away:",
        _anchors(near),
        "Other choices of bursts, same visit, within their range:",
        rows([(f"{design}", _fitted(_by_visit(cells(raw, design))[0])) for design in OTHER_DESIGNS]),
        "Largest errors, same visit (workers x prefetch, visit, truth, predicted):",
        f"```\n{worst(_fitted(near), 8)}\n```",
    ]
    return "\n\n".join(parts)


def _by_visit(found: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    near: list[Cell] = []
    far: list[Cell] = []
    for cell in found:
        (near if cell.repeat == cell.task.repeat else far).append(cell)
    return near, far


def _fitted(found: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in found if cell.is_fitted]


def _anchors(near: Sequence[Cell]) -> str:
    lines = ["|  | first | second | second against first |", "|---|---|---|---|"]
    ratios = []
    for name in WORKLOAD_NAMES:
        runs = {cell.task.repeat: cell.truth for cell in near if _is_anchor(cell.task) and cell.task.workload == name}
        if len(runs) == len(VISITS):
            ratios.append(runs[1] / runs[0] - 1)
            lines.append(f"| {name} | {runs[0]:.1f}/s | {runs[1]:.1f}/s | {ratios[-1]:+.1%} |")
    absolute = sorted(map(abs, ratios))
    if absolute:
        lines.append(f"| **median, largest** | | | {statistics.median(absolute):.1%}, {absolute[-1]:.1%} |")
    return "\n".join(lines)


def _is_anchor(task: Task) -> bool:
    return (task.num_workers, task.prefetch_factor) == ANCHOR


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.fresh", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a sustained run")
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    if not chosen.report:
        quiet = QuietTurns(chosen.lock)
        measure(tasks(), FILES, seconds=chosen.seconds, quiet=quiet, mode=f"visits, {chosen.seconds:g} s")
        print(f"the machine was ours for {quiet.held_s / 60:.1f} minutes")
    if not load(FILES).sustained:
        raise SystemExit("nothing has been measured here yet: the records are not committed; run it without --report")
    print(report())
    near, _ = _by_visit(cells(load(FILES), DESIGN))
    write("fresh", by_workload(near))


if __name__ == "__main__":
    main()
