"""The twin's errors: fits from three scouts each, against every sustained run. Pure functions of the kept raw data."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune_loader.twin import Observation, Prediction, Twin
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from studies.fidelity.grid import LONG_SCOUTS, WORKLOAD_NAMES, Task
from studies.fidelity.records import read, unpack

DESIGN = (1, 4, 12)
"""Workers of the three scouts whose range is called fitted."""
OTHER_DESIGNS = ((0, 1, 4), (0, 4, 12), (0, 1, 8), (1, 4, 8), (0, 2, 12), (1, 12))
CORES = 4
CLOCKWORK = ("cpu_bound", "jpeg")
"""Workloads whose CPU seconds per batch tell how fast the machine is at the moment."""
COMPUTING = ("cpu_bound", "jpeg", "large_tensors", "in_memory")
SMOOTH_S = 20.0
"""The machine's speed changes over minutes; this averages the two or three runs around a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction and what came true."""

    task: Task
    repeat: int
    """Which set of scouts."""
    prediction: Prediction
    truth: float
    design: tuple[int, ...]

    @property
    def error(self) -> float:
        """Relative error, positive where the twin promised too much."""
        return self.prediction.samples_per_s.value / self.truth - 1.0

    @property
    def is_covered(self) -> bool:
        interval = self.prediction.samples_per_s
        return interval.low <= self.truth <= interval.high

    @property
    def is_fitted(self) -> bool:
        """Within the workers of the scouts, and a queue deeper than one batch."""
        inside = min(self.design) <= self.task.num_workers <= max(self.design)
        return inside and (self.task.num_workers == 0 or (self.task.prefetch_factor or 0) >= 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """All records, by what they are for."""

    initial_design: Mapping[tuple[str, int], Mapping[int, Measurement]]
    """By workload and repeat, then by workers."""
    ceilings: Mapping[tuple[str, int], Measurement]
    threads: Mapping[str, int]
    """Intra-op threads of the untouched process."""
    sustained: Sequence[tuple[Task, dict[str, Any]]]
    at: Mapping[tuple[str, int, int], float]
    """When a scout ended, by workload, repeat and workers."""


def load(files: Mapping[str, Path]) -> Raw:
    """The records of all files; failures are left out."""
    initial_design: dict[tuple[str, int], dict[int, Measurement]] = defaultdict(dict)
    ceilings, threads, sustained, at = {}, {}, [], {}
    for path in dict.fromkeys(files.values()):
        for record in read(path):
            if "failure" in record:
                continue
            task = Task(**record["task"])
            threads[task.workload] = record["threads"]
            if task.kind == "scout":
                initial_design[task.workload, task.repeat][task.num_workers] = unpack(record["measurement"])
                at[task.workload, task.repeat, task.num_workers] = record["at"]
            elif task.kind == "ceiling":
                ceilings[task.workload, task.repeat] = unpack(record["measurement"])
            else:
                sustained.append((task, record))
    return Raw(initial_design=initial_design, ceilings=ceilings, threads=threads, sustained=sustained, at=at)


def step_cores(ceiling: Measurement) -> float:
    """Cores that the step kept busy on its own."""
    return min(float(CORES), max(0.0, (ceiling.cpu_share or 0.0) * CORES))


def observed(raw: Raw, workload: str, repeat: int, design: Sequence[int]) -> list[Observation] | None:
    """What the twin is told of one set of scouts; None where one of them is missing."""
    seen = raw.initial_design.get((workload, repeat), {})
    if (workload, repeat % LONG_SCOUTS) not in raw.ceilings or any(workers not in seen for workers in design):
        return None
    configs = [LoaderConfig(num_workers=workers, prefetch_factor=2 if workers else None) for workers in design]
    return [Observation.from_measurement(config, seen[config.num_workers]) for config in configs]


def fit(observations: Sequence[Observation], ceiling: Measurement) -> Twin:
    """The twin of three scouts and the step's ceiling."""
    step_s = {None: ceiling.step_s}
    return Twin.fit(observations, cores=CORES, consumer_cores=step_cores(ceiling), step_s_by_threads=step_s)


def cells(raw: Raw, design: Sequence[int], *, slowness: Slowness | None = None, long: bool = False) -> list[Cell]:
    """Every prediction of every fit with these scouts.

    Args:
        raw: the records.
        design: workers of the scouts.
        slowness: how slow the machine was when; where given, the scouts' CPU seconds are brought to the moment of the run
            that they are to predict, so that the twin's error shows without the machine's drift.
        long: whether to fit the long scouts instead.
    """
    found = []
    for workload, repeat in sorted(raw.initial_design):
        initial_design = observed(raw, workload, repeat, design)
        runs = [(task, record) for task, record in raw.sustained if task.workload == workload]
        if initial_design is None or not runs or long != (repeat >= LONG_SCOUTS):
            continue
        ceiling = raw.ceilings[workload, repeat % LONG_SCOUTS]
        for (task, record), prediction in zip(
            runs, _predictions(raw, initial_design, ceiling, runs, repeat, slowness), strict=True
        ):
            found.append(
                Cell(task=task, repeat=repeat, prediction=prediction, truth=record["truth"], design=tuple(design))
            )
    return found


def _predictions(
    raw: Raw,
    initial_design: Sequence[Observation],
    ceiling: Measurement,
    runs: Sequence[tuple[Task, dict[str, Any]]],
    repeat: int,
    slowness: Slowness | None,
) -> list[Prediction]:
    if slowness is None:
        return fit(initial_design, ceiling).predict_all([task.config for task, _ in runs])
    predictions = []
    for task, record in runs:
        now = slowness.at(record["at"], without=task)
        moved = [
            _slowed(scout, math.exp(now - slowness.at(raw.at[task.workload, repeat, scout.num_workers])), ceiling)
            for scout in initial_design
        ]
        predictions.append(fit(moved, ceiling).predict_all([task.config])[0])
    return predictions


def _slowed(seen: Observation, factor: float, ceiling: Measurement) -> Observation:
    """The same burst on a machine whose CPUs take `factor` times as long."""
    on_cpu = np.minimum(seen.cpu_s, seen.service_s)
    computes = step_cores(ceiling) > 0.5
    return replace(
        seen,
        service_s=seen.service_s + on_cpu * (factor - 1.0),
        cpu_s=seen.cpu_s * factor,
        receive_s=seen.receive_s * factor,
        step_s=seen.step_s * (factor if computes else 1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How slow the machine's CPUs were at a moment: logarithm of CPU seconds for the same work, from runs around it."""

    moments: Sequence[tuple[float, float, Task]]
    """When, by how much, in which run."""

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> Slowness:
        """From the CPU seconds per batch of the workloads that compute, relative to their own at as many workers."""
        seen: list[tuple[float, float, Task]] = []
        for path in dict.fromkeys(files.values()):
            for record in read(path):
                task = Task(**record["task"])
                if task.workload not in CLOCKWORK or task.kind == "ceiling" or "measurement" not in record:
                    continue
                middle = record["at"] - record["seconds"] / 2
                seen.append((middle, math.log(record["measurement"]["service_cpu_s"]), task))
        levels: dict[tuple[str, int], float] = defaultdict(float)
        for _ in range(20):
            rest = cls(moments=[(at, value - levels[_like(task)], task) for at, value, task in seen])
            for like in {_like(task) for _, _, task in seen}:
                of = [value - rest.at(at, without=task) for at, value, task in seen if _like(task) == like]
                levels[like] = statistics.fmean(of)
        return cls(moments=[(at, value - levels[_like(task)], task) for at, value, task in seen])

    def at(self, moment: float, without: Task | None = None) -> float:
        """Smoothed over about `SMOOTH_S`; the run that is to be predicted has no say."""
        total = weights = 1e-9
        for at, value, task in self.moments:
            if task != without:
                weight = math.exp(-0.5 * ((at - moment) / SMOOTH_S) ** 2)
                total, weights = total + weight * value, weights + weight
        return total / weights


def _like(task: Task) -> tuple[str, int]:
    return task.workload, task.num_workers


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def rows(named: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """A Markdown table: count, median, p95 and largest absolute error, mean error, coverage of each group that is not empty."""
    lines = ["|  | n | median | p95 | max | bias | covered |", "|---|---|---|---|---|---|---|"]
    for name, found in named:
        if found:
            absolute = [abs(cell.error) for cell in found]
            lines.append(
                f"| {name} | {len(found)} | {statistics.median(absolute):.1%} | {percentile(absolute, 0.95):.1%} "
                f"| {max(absolute):.1%} | {statistics.fmean(cell.error for cell in found):+.1%} "
                f"| {statistics.fmean(cell.is_covered for cell in found):.0%} |"
            )
    return "\n".join(lines)


def by_workload(found: Sequence[Cell]) -> str:
    """Errors by workload where the twin was fitted, and apart where it was not."""
    fitted = [cell for cell in found if cell.is_fitted]
    one = [cell for cell in found if cell.task.prefetch_factor == 1]
    beyond = [cell for cell in found if not cell.is_fitted and cell.task.prefetch_factor != 1]
    return rows(
        [
            *((name, [cell for cell in fitted if cell.task.workload == name]) for name in WORKLOAD_NAMES),
            ("**all, prefetch >= 2, fitted**", fitted),
            ("prefetch 1, apart", one),
            ("extrapolated, apart", beyond),
        ]
    )


def rerun(raw: Raw, slowness: Slowness | None = None) -> str:
    """How well one sustained run predicts another of the same configuration.

    Both runs are noisy, so a perfect prediction of the mean would be off by about 1 / sqrt(2) of this.
    """
    again: dict[tuple[str, LoaderConfig], list[float]] = defaultdict(list)
    for task, record in raw.sustained:
        slower = slowness.at(record["at"], without=task) if slowness and task.workload in COMPUTING else 0.0
        again[task.workload, task.config].append(record["truth"] * math.exp(slower))
    lines = ["|  | pairs | median | p95 |", "|---|---|---|---|"]
    for name in [*WORKLOAD_NAMES, None]:
        errors = [
            abs(a / b - 1)
            for (workload, _), rates in again.items()
            if name in (workload, None)
            for a, b in itertools.permutations(rates, 2)
        ]
        if errors:
            title = name or "all that were run again"
            lines.append(
                f"| {title} | {len(errors)} | {statistics.median(errors):.1%} | {percentile(errors, 0.95):.1%} |"
            )
    return "\n".join(lines)


def worst(found: Sequence[Cell], count: int) -> str:
    """The largest errors, one per line."""
    chosen = sorted(found, key=lambda cell: -abs(cell.error))[:count]
    return "\n".join(
        f"{cell.task.workload:16} {cell.task.num_workers:2} x {cell.task.prefetch_factor or 0} "
        f"#{cell.repeat} {cell.truth:10.1f} {cell.prediction.samples_per_s.value:10.1f} {cell.error:+7.1%} "
        f"{'covered' if cell.is_covered else ''}"
        for cell in chosen
    )


def report(files: Mapping[str, Path]) -> str:
    """The tables, as text."""
    raw, slowness = load(files), Slowness.of(files)
    found = cells(raw, DESIGN)
    drift = statistics.pstdev(value for _, value, _ in slowness.moments)
    parts = [
        f"Absolute error; a fit has one burst each at {DESIGN} workers, prefetch 2:",
        by_workload(found),
        "The same, the scouts brought to the speed that the machine had in each sustained run:",
        by_workload(cells(raw, DESIGN, slowness=slowness)),
        "A sustained run against another of the same configuration, five workloads (noise of both runs):",
        rerun(raw),
        "The same with the drift taken out of the rates of workloads that compute:",
        rerun(raw, slowness),
        f"CPU seconds for the same work varied with sd {drift:.1%}.",
        "Other bursts (workers of the scouts; long: up to 12 s, heavy tail only):",
        rows(_designs(raw)),
        "Largest errors within the fitted range (workers x prefetch, scouts, truth, predicted):",
        f"```\n{worst([cell for cell in found if cell.is_fitted], 12)}\n```",
    ]
    return "\n\n".join(parts)


def _designs(raw: Raw) -> list[tuple[str, list[Cell]]]:
    named = [(f"{DESIGN}, long", [cell for cell in cells(raw, DESIGN, long=True) if cell.is_fitted])]
    for design in OTHER_DESIGNS:
        others = [cell for cell in cells(raw, design) if cell.task.prefetch_factor != 1]
        named.append((f"{design}", [cell for cell in others if cell.is_fitted]))
        named.append((f"{design}, extrapolated", [cell for cell in others if not cell.is_fitted]))
    return named
