"""What does it cost until a worker is there? torch's DataLoader beside AutoLoader, one fresh process for each, in turns.

    python -m studies.live.births                          # all rows, about an hour on two cores
    python -m studies.live.births --only spawn --rounds 5  # groups of rows with that word
    python -m studies.live.births --only kills --kills 200
    python -m studies.live.births --small                  # whether the study works; its bars are not judged

Run it on a quiet machine. CPU seconds are of all processes below the training, as is PSS: shared pages count once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from studies.processes import NoAnswerError, last_line

ANEW = ("spawn", "forkserver")
"""Start methods whose workers begin in a process of their own."""
TIMEOUT_S = 900.0
MOST_FIELDS = 3
MOST_RATIO, FURTHER_MS, STEP_MS = 1.3, 30.0, 100.0


class Sizes(NamedTuple):
    """How much is measured."""

    entries: int
    many: int
    """Workers, beside one."""
    batches: int
    """Before memory is read."""
    further: int
    boundaries: int
    limit_s: float
    """Of epochs, once three boundaries are measured."""
    pictures: int
    copies: int
    picture_batches: int


FULL = Sizes(1_200_000, 8, 500, 24, 19, 60.0, 27_000, 10, 100)
SMALL = Sizes(60_000, 3, 50, 3, 3, 5.0, 1000, 2, 10)


class Row(NamedTuple):
    """Of the table; `is_met` is None where no bar is judged."""

    figure: str
    torch: str
    ours: str
    bar: str = ""
    is_met: bool | None = None

    def __str__(self) -> str:
        met = {True: "yes", False: "NO", None: "-"}[self.is_met]
        return f"| {self.figure} | {self.torch} | {self.ours} | {self.bar or '-'} | {met} |"


class Options(NamedTuple):
    """Of the command."""

    sizes: Sizes
    rounds: int
    kills: int
    seed: int
    is_judged: bool


Answers = Mapping[tuple[str, str], list[dict[str, Any]]]
"""Of jobs, by side (`torch`, `ours`) and case, one a round; empty where a process gave none."""
Table = Iterator[Row | str]
"""Rows, and notes to be printed below."""


def answer(job: str, **given: Any) -> dict[str, Any]:
    """Of a job in a fresh process; nothing where it fails, of which stderr tells."""
    try:
        found = last_line(str(Path(__file__)), "--job", json.dumps({"job": job, **given}), timeout_s=TIMEOUT_S)
    except NoAnswerError as error:
        print(f"{job} {given}: {error}", file=sys.stderr, flush=True)
        return {}
    return dict(json.loads(found))


def answers(rounds: int, cases: Mapping[tuple[str, str], dict[str, Any]]) -> Answers:
    """Sides and cases take turns; every second round runs backwards."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in cases}
    for number in range(rounds):
        for key in sorted(cases, key=list(cases).index, reverse=bool(number % 2)):
            found[key].append(answer(**cases[key]))
    return found


def both(cases: Mapping[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Each case for either side."""
    return {(which, case): {**given, "which": which} for case, given in cases.items() for which in ("torch", "ours")}


def values(found: list[dict[str, Any]], name: str) -> list[float]:
    return [each[name] for each in found if each]


def ratios(found: list[dict[str, Any]], to: list[dict[str, Any]], name: str) -> list[float]:
    """Of the same rounds; a fork of little data takes less than the clock's tick."""
    return [each[name] / one[name] for each, one in zip(found, to, strict=True) if each and one and one[name]]


def number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def told(found: list[float]) -> str:
    """Median, and the range where there are several."""
    if not found:
        return "no answer"
    spread = f" ({number(min(found))} to {number(max(found))})" if len(found) > 1 else ""
    return number(statistics.median(found)) + spread


def compared(options: Options, figure: str, torch: list[float], ours: list[float], bar: float | None = None) -> Row:
    """The median of ours is to be at most the bar; without an answer it is not met."""
    is_met = None
    if bar is not None and options.is_judged:
        is_met = bool(ours) and statistics.median(ours) <= bar
    return Row(figure, told(torch), told(ours), "" if bar is None else f"{bar:g}", is_met)


def starts(options: Options, method: str) -> Table:
    """One worker and many over large data."""
    sizes = options.sizes
    shared = {"job": "start", "method": method, "data": "entries", "entries": sizes.entries, "batches": sizes.batches}
    found = answers(options.rounds, both({str(n): {**shared, "workers": n} for n in (1, sizes.many)}))
    of = f"{method}, {sizes.entries:,} entries"
    for count in (1, sizes.many):
        torch, ours = found["torch", str(count)], found["ours", str(count)]
        bars = (2.5, None, 400.0) if count > 1 else (None, None, None)
        for name, what, bar in zip(("cpu_s", "wall_s", "pss_mb"), ("CPU, s", "wall, s", "PSS, MB"), bars, strict=True):
            figure = f"{of}, {count} worker{'s' * (count > 1)}: {what}"
            yield compared(options, figure, values(torch, name), values(ours, name), bar)
    one = found["torch", "1"]
    for name, what in (("cpu_s", "CPU"), ("wall_s", "wall")):
        torch, ours = (ratios(found[which, str(sizes.many)], one, name) for which in ("torch", "ours"))
        yield compared(options, f"{of}: {what} of {sizes.many}, to torch's of 1", torch, ours, MOST_RATIO)


def further_workers(options: Options) -> Table:
    """AutoLoader's in mid-epoch; of torch a whole start of one."""
    sizes, methods = options.sizes, (*ANEW, "fork")
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for method in methods:
        shared = {"method": method, "entries": sizes.entries}
        alone = {"data": "entries", "workers": 1, "batches": 0}
        cases["torch", method] = {"job": "start", "which": "torch", **shared, **alone}
        cases["ours", method] = {"job": "further", "which": "ours", **shared, "workers": sizes.further}
    found = answers(options.rounds, cases)
    for method in methods:
        torch, ours = found["torch", method], found["ours", method]
        for name, its, what in (
            ("there_s", "iter_s", "its process is there"),
            ("sample_s", "sample_s", "its first sample begins"),
        ):
            each = [1e3 * seconds for one in ours if one for seconds in one[name]]
            figure = f"each of {sizes.further} further workers, {method}: ms until {what}"
            bar = FURTHER_MS if name == "there_s" else None  # all begin at once, on few cores
            yield compared(options, figure, [1e3 * seconds for seconds in values(torch, its)], each, bar)


def unasked(options: Options) -> Table:
    """Workers that nobody asked for begin beside the loop."""
    cases = {}
    for method in (*ANEW, "fork"):
        for entries in (options.sizes.entries // 6, options.sizes.entries):
            cases[f"{method}, {entries:,} entries"] = {"job": "unasked", "method": method, "entries": entries}
    found = answers(options.rounds, both(cases))
    for case in cases:
        torch, ours = ([1e3 * s for s in values(found[which, case], "longest_s")] for which in ("torch", "ours"))
        bar = None if case.startswith("fork,") else STEP_MS
        yield compared(options, f"longest step where nobody asked, {case}: ms", torch, ours, bar)


def boundaries(options: Options) -> Table:
    """An epoch after another, with workers that are not kept."""
    sizes, cases = options.sizes, {}
    shared = {"job": "boundary", "entries": sizes.entries, "boundaries": sizes.boundaries, "limit_s": sizes.limit_s}
    for method, is_changed in ((ANEW[0], False), (ANEW[0], True), (ANEW[1], False), (ANEW[1], True), ("fork", False)):
        case = f"{method}, data {'changed' if is_changed else 'unchanged'}"
        cases[case] = {**shared, "method": method, "is_changed": is_changed}
    found = answers(options.rounds, both(cases))
    for case in cases:
        torch, ours = found["torch", case], found["ours", case]
        bar = None if case.startswith("fork,") else 1.2 if "unchanged" not in case else 0.2
        count = " and ".join(str(int(max(values(each, "boundaries"), default=0))) for each in (torch, ours))
        figure = f"epoch boundary, {case}: s, median of {count}"
        yield compared(options, figure, values(torch, "boundary_s"), values(ours, "boundary_s"), bar)


def imports(options: Options) -> Table:
    """Workers whose dataset imports much."""
    sizes = options.sizes
    shared = {"job": "start", "method": "spawn", "data": "imports", "entries": sizes.entries, "batches": 0}
    found = answers(options.rounds, both({str(n): {**shared, "workers": n} for n in (1, sizes.many)}))
    for count in (1, sizes.many):
        torch, ours = found["torch", str(count)], found["ours", str(count)]
        for name, what, bar in (("cpu_s", "CPU, s", 6.0 if count > 1 else None), ("wall_s", "wall, s", None)):
            figure = f"heavy imports, spawn, {count} worker{'s' * (count > 1)}: {what}"
            yield compared(options, figure, values(torch, name), values(ours, name), bar)
    missing = {name for each in found.values() for one in each for name in one.get("missing", ())}
    yield f"Heavy imports that are not installed, and left out: {', '.join(sorted(missing)) or 'none'}."


def first_batches(options: Options) -> Table:
    """The job of torchdata's worker_start_benchmark, by the default start method and by its own."""
    from studies.live.births_jobs import picture_files

    sizes, default = options.sizes, multiprocessing.get_start_method()
    sides = ["torch", "ours"] + ["stateful"] * _is_installed("torchdata")
    methods = {f"the default ({default})": None} | ({"spawn": "spawn"} if default != "spawn" else {})
    with tempfile.TemporaryDirectory() as folder:
        picture_files(Path(folder), sizes.pictures)
        shared = {"job": "first_batch", "folder": folder, "workers": sizes.many, "pictures": sizes.pictures}
        shared |= {"copies": sizes.copies, "batches": sizes.picture_batches}
        cases = {
            (side, case): {**shared, "which": side, "method": method}
            for case, method in methods.items()
            for side in sides
        }
        found = answers(options.rounds, cases)
    for case in methods:
        of = f"worker_start_benchmark, {case}, {sizes.many} workers"
        for name, what in (
            ("iter_s", "iterator, s"),
            ("first_s", "first batch, s"),
            ("memory_mb", "memory, MB more"),
            ("rate", "samples/s after it"),
        ):
            torch, ours = values(found["torch", case], name), values(found["ours", case], name)
            row = compared(options, f"{of}: {what}", torch, ours)
            if "stateful" in sides:
                row = row._replace(torch=f"{row.torch}; torchdata {told(values(found['stateful', case], name))}")
            yield row
    digests = {one["digest"] for (side, _), each in found.items() if side != "stateful" for one in each if one}
    yield f"First batches of worker_start_benchmark: {'all equal' if len(digests) == 1 else 'NOT EQUAL'}."


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def fields(options: Options) -> Table:
    """In what a worker differs from torch's."""
    from studies.live.births_fields import facts

    for method in ANEW:
        found = answers(2, both({method: {"job": "fields", "method": method}}))
        if not all(all(each) for each in found.values()):
            yield Row(f"fields of a worker, {method}", "0", "no answer", f"{MOST_FIELDS}", False)
            continue
        torch, ours = facts(*found["torch", method]), facts(*found["ours", method])
        differing = [name for name in torch if torch[name] != ours.get(name)]
        said = f"{len(differing)}{': ' * bool(differing)}{', '.join(differing)}"
        figure = f"fields of a worker, {method}: those of {len(torch)} that differ"
        yield Row(figure, "0", said, f"{MOST_FIELDS}", len(differing) <= MOST_FIELDS)
        for name in differing:
            yield f"{method}, {name}: torch {torch[name]}, AutoLoader {ours.get(name)}."


def kills(options: Options) -> Table:
    """AutoLoader's trainings, disturbed."""
    from studies.live.births_kills import kill_births

    tally = kill_births(options.kills, options.seed, ANEW)
    figure = f"{tally.kills.total()} kills of root, nursery, worker, training"
    yield Row(figure, "-", tally.faults(), "0 of each", not tally.is_bad)
    yield from tally.notes()


ROWS: dict[str, Callable[[Options], Table]] = {
    "entries, spawn": lambda options: starts(options, "spawn"),
    "entries, forkserver": lambda options: starts(options, "forkserver"),
    "further workers": further_workers,
    "nobody asked": unasked,
    "epoch boundary": boundaries,
    "heavy imports": imports,
    "worker_start_benchmark": first_batches,
    "fields": fields,
    "kills": kills,
}


def machine() -> str:
    from autotune_loader.machine.facts import cpu_model
    from autotune_loader.machine.limits import usable_cores

    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}"
    method = multiprocessing.get_start_method()
    return f"{usable_cores().usable} cores of {cpu_model()}; {versions}, whose default start method is {method}"


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"a word of a group's name: {'; '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        from studies.live import births_fields, births_jobs

        job = json.loads(given.job)
        print(json.dumps({**births_jobs.JOBS, "fields": births_fields.fields}[job.pop("job")](**job)))
        return 0
    options = Options(SMALL if given.small else FULL, given.rounds, given.kills, given.seed, not given.small)
    print(f"{machine()}; rounds: {given.rounds}; {load()}\n")
    print("| figure | torch | AutoLoader | bar | met? |\n|---|---|---|---|---|", flush=True)
    notes = list[str]()
    for name, rows in ROWS.items():
        if given.only in name:
            for each in rows(options):
                if isinstance(each, Row):
                    print(each, flush=True)
                else:
                    notes.append(each)
            notes.append(f"After {name}: {load()}.")
    print("", *(f"* {note}" for note in notes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
