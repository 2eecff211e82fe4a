"""The twin's errors: fits from three scouts each, against every sustained run. Pure functions of the kept raw data."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune_loader.config import LoaderConfig
from autotune_loader.trial import Measurement
from autotune_loader.twin import Observation, Prediction, Twin
from studies.fidelity.grid import WORKLOAD_NAMES, Task
from studies.fidelity.records import RESULTS, read, unpack

DESIGN = (1, 4, 12)
"""Workers of the three scouts whose range is called fitted."""
OTHER_DESIGNS = ((0, 1, 4), (0, 4, 12), (0, 1, 8), (1, 4, 8), (0, 2, 12), (1, 12))
CORES = 4


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

    scouts: Mapping[tuple[str, int], Mapping[int, Measurement]]
    """By workload and repeat, then by workers."""
    ceilings: Mapping[tuple[str, int], Measurement]
    threads: Mapping[str, int]
    """Intra-op threads of the untouched process."""
    sustained: Sequence[tuple[Task, dict[str, Any]]]


def load(files: Mapping[str, Path]) -> Raw:
    """The records of all files; failures are left out."""
    scouts: dict[tuple[str, int], dict[int, Measurement]] = defaultdict(dict)
    ceilings, threads, sustained = {}, {}, []
    for path in dict.fromkeys(files.values()):
        for record in read(path):
            if "failure" in record:
                continue
            task = Task(**record["task"])
            threads[task.workload] = record["threads"]
            if task.kind == "scout":
                scouts[task.workload, task.repeat][task.num_workers] = unpack(record["measurement"])
            elif task.kind == "ceiling":
                ceilings[task.workload, task.repeat] = unpack(record["measurement"])
            else:
                sustained.append((task, record))
    return Raw(scouts=scouts, ceilings=ceilings, threads=threads, sustained=sustained)


def step_cores(ceiling: Measurement) -> float:
    """Cores that the step kept busy on its own."""
    return min(float(CORES), max(0.0, (ceiling.cpu_share or 0.0) * CORES))


def fit(raw: Raw, workload: str, repeat: int, design: Sequence[int]) -> Twin | None:
    """The twin of one set of scouts; None where one of them is missing."""
    seen, ceiling = raw.scouts.get((workload, repeat), {}), raw.ceilings.get((workload, repeat))
    if ceiling is None or any(workers not in seen for workers in design):
        return None
    observations = [
        Observation.from_measurement(
            LoaderConfig(num_workers=workers, prefetch_factor=2 if workers else None), seen[workers]
        )
        for workers in design
    ]
    return Twin.fit(
        observations, cores=CORES, consumer_cores=step_cores(ceiling), step_s_by_threads={None: ceiling.step_s}
    )


def cells(raw: Raw, design: Sequence[int]) -> list[Cell]:
    """Every prediction of every fit with these scouts."""
    found = []
    for (workload, repeat), _ in sorted(raw.scouts.items()):
        twin = fit(raw, workload, repeat, design)
        runs = [(task, record) for task, record in raw.sustained if task.workload == workload]
        if twin is None or not runs:
            continue
        for (task, record), prediction in zip(runs, twin.predict_all([task.config for task, _ in runs]), strict=True):
            found.append(
                Cell(task=task, repeat=repeat, prediction=prediction, truth=record["truth"], design=tuple(design))
            )
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(chosen: Sequence[Cell]) -> str:
    """One row: count, median and p95 of the absolute error, mean error, coverage, in percent."""
    if not chosen:
        return "   -"
    absolute = [abs(cell.error) for cell in chosen]
    covered = statistics.fmean(cell.is_covered for cell in chosen)
    bias = statistics.fmean(cell.error for cell in chosen)
    return (
        f"{len(chosen):5} {statistics.median(absolute):8.1%} {percentile(absolute, 0.95):8.1%} "
        f"{max(absolute):8.1%} {bias:+8.1%} {covered:8.0%}"
    )


def table(found: Sequence[Cell]) -> str:
    """Errors by workload where the twin was fitted, and apart where it was not."""
    lines = [f"{'':34}    n   median      p95      max     bias  covered"]
    fitted = [cell for cell in found if cell.is_fitted]
    for name in WORKLOAD_NAMES:
        lines.append(f"{name:34}{summary([cell for cell in fitted if cell.task.workload == name])}")
    one = [cell for cell in found if cell.task.prefetch_factor == 1]
    beyond = [cell for cell in found if not cell.is_fitted and cell.task.prefetch_factor != 1]
    lines.append(f"{'all, prefetch >= 2, fitted':34}{summary(fitted)}")
    lines.append(f"{'prefetch 1, apart':34}{summary(one)}")
    lines.append(f"{'extrapolated, apart':34}{summary(beyond)}")
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


def report(files: Mapping[str, Path]) -> None:
    """Print the tables and draw the plots."""
    raw = load(files)
    found = cells(raw, DESIGN)
    print(f"\nTwin fitted to one burst each at {DESIGN} workers, prefetch 2, against sustained runs")
    print(table(found))
    print("\nLargest errors within the fitted range: workers x prefetch, scouts, truth, predicted")
    print(worst([cell for cell in found if cell.is_fitted], 20))
    for design in OTHER_DESIGNS:
        others = cells(raw, design)
        print(f"\nscouts at {design}: fitted    {summary([c for c in others if c.is_fitted])}")
        beyond = [c for c in others if not c.is_fitted and c.task.prefetch_factor != 1]
        print(f"{'':20} beyond    {summary(beyond)}")
    from studies.fidelity.plots import draw

    draw(found, RESULTS)
