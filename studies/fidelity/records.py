"""Raw data of the fidelity studies: one JSON object per line, appended, never rewritten.

Traces are kept as rows of numbers in seconds from the first request, rounded to a microsecond; a gzip member per line.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from autotune_loader.values.measurement import Measurement
from autotune_loader.values.trace import BatchTrace

RESULTS = Path(__file__).parent / "results"
DIGITS = 6
_CLOCKS = ("fetch_start", "fetch_end", "collate_end", "requested", "received", "step_end")


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one record; a kill in between loses at most this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, separators=(",", ":")) + "\n"
    if path.suffix == ".gz":
        with gzip.open(path, "at") as file:
            file.write(line)
    else:
        with path.open("a") as file:
            file.write(line)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records in the order in which they were measured."""
    if not path.exists():
        return
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in file:
            yield json.loads(line)


def pack(measurement: Measurement, *, traces: bool) -> dict[str, Any]:
    """A measurement as plain data, with or without its traces."""
    rate = measurement.samples_per_s
    bounded = replace(rate, high=min(rate.high, 1e15))  # JSON knows no infinity
    plain: dict[str, Any] = msgspec.to_builtins(replace(measurement, samples_per_s=bounded, traces=()))
    return {**plain, "traces": _rows(measurement) if traces else []}


def unpack(plain: dict[str, Any]) -> Measurement:
    """The measurement that `pack` packed."""
    names = [field.name for field in fields(BatchTrace)]
    traces = [dict(zip(names, row, strict=True)) for row in plain["traces"]]
    return msgspec.convert({**plain, "traces": traces}, Measurement, strict=False)


def _rows(measurement: Measurement) -> list[list[float]]:
    if not measurement.traces:
        return []
    origin = measurement.traces[0].requested
    at = [i for i, field in enumerate(fields(BatchTrace)) if field.name in _CLOCKS]
    rows = []
    for trace in measurement.traces:
        row = list(astuple(trace))
        for i in at:
            row[i] -= origin
        rows.append([round(value, DIGITS) if isinstance(value, float) else value for value in row])
    return rows
