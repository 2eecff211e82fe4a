"""The histories of batches as a file that https://ui.perfetto.dev opens: JSON of Chrome's trace event format.

Each loader is a process there, in which the loop, the pinning thread and each worker are threads. Batches that are sent,
of which several are on their way at once, lie above one another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from math import isfinite
from typing import Any

from autotune_loader.values import MAIN_PROCESS, BatchTrace, LoaderTrace, spans_of
from autotune_loader.values.serialization import replacing
from autotune_loader.values.trace import PINNING_THREAD

IDS = 1000
"""From the id of a process to the next: more than any has threads, as an id of a thread stands once in a file."""
FEWEST = 8
"""Batches in a row without which it is not known how many are ready: beside fewer lie more that were not kept."""
FLOWS = {"fetch": ("flow_out",), "pin": ("flow_in", "flow_out"), "step": ("flow_in",)}
"""The way of a batch that arrows show. A wait has none: it may begin before its batch does."""


def write_trace(path: str | os.PathLike[str], loaders: Sequence[LoaderTrace]) -> None:
    """Write a trace, through a temporary file in the same folder and a rename.

    Args:
        path: Of the file to write; its folder is made.
        loaders: What to show, from top to bottom. Time 0 is the earliest moment of all.

    Raises:
        OSError: It cannot be written.
    """
    zero = min((moment for each in loaders for moment in _moments(each)), default=0.0)
    events = (
        event
        for place, each in enumerate(loaders, 1)
        for event in _events(each, place * IDS, lambda moment: round(1e6 * (moment - zero)))
    )
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with replacing(path) as stream:
        stream.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for place, event in enumerate(events):
            stream.write(f"{',' if place else ''}\n{encode(event)}".encode())
        stream.write(b"\n]}\n")


def processes_of(traces: Iterable[BatchTrace]) -> dict[int, str]:
    """The names of the rows of a timeline, from top to bottom: the loop, the pinning thread, the workers."""
    names, found = {MAIN_PROCESS: "training loop", PINNING_THREAD: "pinning thread"}, {MAIN_PROCESS}
    found.update(span.process for trace in traces for span in spans_of(trace))
    ordered = sorted(found, key=lambda process: (process != MAIN_PROCESS, process))
    return {process: names.get(process, f"worker {process}") for process in ordered}


def _moments(loader: LoaderTrace) -> Iterator[float]:
    yield from (min(row.fetch_start, row.requested) for row in loader.rows.values())
    yield from (begin for _, begin, _ in loader.intervals)
    yield from (moment for values in loader.counters.values() for moment, _ in values[:1])


def _events(loader: LoaderTrace, pid: int, at: Callable[[float], int]) -> Iterator[dict[str, Any]]:
    """The events of a loader, where `at` gives the microseconds of a moment."""
    names = processes_of(loader.rows.values())
    tids = {process: tid for tid, process in enumerate(names, pid + 1)}

    def event(phase: str, name: str, begin: float, tid: int = pid, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": at(begin), **more}

    def span(name: str, begin: float, end: float, tid: int = pid, **more: Any) -> dict[str, Any]:
        return event("X", name, begin, tid, dur=max(0, at(end) - at(begin)), **more)

    titles = [("process", pid, loader.name), *(("thread", tids[process], name) for process, name in names.items())]
    for kind, tid, name in [*titles, ("thread", pid, "phases")] if loader.intervals else titles:
        to = {"ph": "M", "pid": pid, "tid": tid}
        yield {**to, "name": f"{kind}_name", "args": {"name": name}}
        yield {**to, "name": f"{kind}_sort_index", "args": {"sort_index": tid}}
    yield from (span(*each) for each in loader.intervals)
    for name, values in (*loader.counters.items(), ("ready batches", _ready(loader.rows))):
        yield from (event("C", name, moment, args={"": value}) for moment, value in values if isfinite(value))
    before, last = 0, None
    for number, row in loader.rows.items():
        if last is not None and number > before + 1:
            left_out = {"batches": number - before - 1}
            yield span("not kept", last.step_end, row.requested, tids[MAIN_PROCESS], args=left_out)
        before, last = number, row
        args, flow = {"batch": number}, number * IDS + pid // IDS
        of_fetch = {"samples": row.samples, "wait_ms": round(1e3 * row.wait_s, 3)}
        if isfinite(row.cpu_s):
            of_fetch["cpu_ms"] = round(1e3 * row.cpu_s, 3)
        for activity, process, begin, end in spans_of(row):
            if activity == "send":
                here = {"local": str(number)}
                yield event("b", activity, begin, id2=here, cat=activity, args={**args, "worker": process})
                yield event("e", activity, max(begin, end), id2=here, cat=activity)
                continue
            arrows = FLOWS.get(activity, ()) if row.worker != MAIN_PROCESS else ()
            more = {"bind_id": flow, **dict.fromkeys(arrows, True)} if arrows else {}
            told = {**args, **of_fetch} if activity == "fetch" else args
            yield span(activity, begin, end, tids[process], args=told, **more)


def _ready(rows: Mapping[int, BatchTrace]) -> Iterator[tuple[float, int]]:
    """Seconds, and how many batches are whole and wait for the loop: while the last of a run of batches is not one of them,
    as those that come next were not kept.
    """
    for _, each in groupby(enumerate(rows.items()), lambda placed: placed[1][0] - placed[0]):
        run = [row for _, (_, row) in each if row.worker != MAIN_PROCESS]
        changes = sorted([(row.ready, -1) for row in run] + [(row.received, 1) for row in run])
        taken = accumulate(change for _, change in changes)
        for (moment, _), count in zip(changes, taken, strict=True):
            if len(run) >= FEWEST and run[0].requested <= moment <= run[-1].ready:
                yield moment, -count
