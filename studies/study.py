"""What a study is, and how its answer is told: `python -m studies NAME` prints what `rows()` of a module yields.

The module's docstring begins with the question, `BAR` says what the answer is held against, and the arguments of `rows()`,
which all have a default, are options of the command. A list in a cell is what was measured again and again: its median, its
range and its count are printed. Text that is yielded is a note below the table.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from autotune_loader.machine.facts import cpu_model
from autotune_loader.machine.limits import usable_cores
from autotune_loader.values import Interval
from studies.processes import ROOT


class Row(NamedTuple):
    """Cells by column, and whether they are within the bar: None where they are not judged, or do not tell."""

    cells: Mapping[str, object]
    is_met: bool | None = None


Table = Iterator[Row | str]
"""Rows, of one table or of several with columns of their own, and notes."""


def number(value: float) -> str:
    """Three digits, and no more than a tenth of a percent of what is larger."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 4}f}"


def told(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "**no**"
    if isinstance(cell, float):
        return number(cell)
    if isinstance(cell, Interval):
        return f"{cell}, n = {cell.count}"
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        if not cell:
            return "no answer"
        spread = f" ({number(min(cell))} to {number(max(cell))}, n = {len(cell)})" if len(cell) > 1 else ""
        return number(statistics.median(cell)) + spread
    return str(cell).replace("|", "\\|").replace("\n", " ")


def print_table(found: Iterable[Row | str]) -> bool:
    """Print rows as they come, and whether none is outside its bar."""
    columns, notes, is_met = list[str](), list[str](), True
    for each in found:
        if isinstance(each, str):
            notes.append(each)
            continue
        if list(each.cells) != columns:
            columns = list(each.cells)
            print(f"\n| {' | '.join(columns)} | within the bar |\n|{'---|' * (len(columns) + 1)}")
        verdict = "-" if each.is_met is None else told(each.is_met)
        print(f"| {' | '.join(map(told, each.cells.values()))} | {verdict} |", flush=True)
        is_met &= each.is_met is not False
    if notes:
        print("", *(f"* {note}" for note in notes), sep="\n")
    return is_met


def machine() -> str:
    """What figures depend on, as studies/README.md names machines: cores, GiB and CPU, versions, load, commit."""
    cores, gib = usable_cores().usable, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"`{cores}c-{gib:.0f}g` ({cpu_model()}), torch {metadata.version('torch')}, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f} at {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, commit {commit()}"
    )


def commit() -> str:
    """Of the tree that is measured; with a plus where something was changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return said or "unknown"


def record(job: str, what: str, **values: Any) -> None:
    """Print a single measurement at once: a run that is cut off keeps it."""
    print("RECORD", json.dumps({"job": job, "what": what, **values}), flush=True)
