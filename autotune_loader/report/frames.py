"""Results as pandas frames: a row for each trial, each stage, or each side of a comparison.

Units are in the names: `_s` seconds, `_bytes` bytes, `_share` 0 to 1. Columns and their types are always the same, also
without a row; what was not measured is NA. Of a GPU, `gpu_busy_share` (steps, by its events) and `gpu_memory_bytes` (as torch
allocated it) are the job's, `gpu_utilization` (0 to 1, kernels) and `gpu_used_bytes` everybody's, as NVML tells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.result import TuningResult
from autotune_loader.values import Interval, MissingExtraError, Trial
from autotune_loader.values.serialization import fields_of

if TYPE_CHECKING:
    import pandas as pd

OF_TRIAL = """
    number round num_workers prefetch_factor pin_memory persistent_workers in_order multiprocessing_context batch_size
    device_prefetch samples_per_s samples_per_s_low samples_per_s_high predicted_samples_per_s wait_share first_batch_s
    service_s service_cpu_s receive_s step_s copy_s cpu_share foreign_cpu_share rss_bytes pss_bytes shm_bytes
    gpu_busy_share gpu_utilization gpu_memory_bytes gpu_used_bytes seconds failure_kind failure_phase failure_message
"""
OF_STAGE = "stage where wall_share cpu_share wall_s cpu_s"
OF_SIDE = """
    side config batch_size rate rate_low rate_high ratio ratio_low ratio_high wait_share cpu_share gpu_busy_share
    gpu_utilization memory_bytes bottleneck error
"""
TYPES = {  # of columns, which allow NA: pandas would turn integers beside a missing one into floats; others are float64
    "Int64": "number round num_workers prefetch_factor batch_size device_prefetch rss_bytes pss_bytes shm_bytes "
    "gpu_memory_bytes gpu_used_bytes memory_bytes",
    "boolean": "pin_memory persistent_workers in_order",
    "object": "multiprocessing_context failure_kind failure_phase failure_message stage where side config bottleneck error",
}


def trials_frame(result: TuningResult) -> pd.DataFrame:
    """One row per trial in the order they ran: configuration, rates, waits, memory, failure."""
    return _frame(map(_trial_row, result.trials), OF_TRIAL)


def stages_frame(result: TuningResult) -> pd.DataFrame:
    """One row per stage of a sample in a worker, the longest first."""
    return _frame(map(fields_of, result.stages), OF_STAGE)


def sides_frame(comparison: Comparison) -> pd.DataFrame:
    """One row per side: configuration, rate and ratio with their limits, shares, bytes, bottleneck, error."""
    return _frame((_side_row(comparison, side) for side in comparison.sides), OF_SIDE)


def _trial_row(trial: Trial) -> dict[str, Any]:
    measured = trial.measurement
    records = [measured and measured.memory, measured, trial.config, trial]  # the last that has a field decides
    row = {name: value for each in records if each is not None for name, value in fields_of(each).items()}
    failure = {} if trial.failure is None else fields_of(trial.failure)
    return {**row, **{f"failure_{name}": value for name, value in failure.items()}}


def _side_row(comparison: Comparison, side: Side) -> dict[str, Any]:
    measured = side.measurement
    return {
        **({} if measured is None else fields_of(measured)),
        "side": side.name,
        "config": str(side.config),
        "batch_size": measured and round(measured.batch_size),
        "rate": comparison.rates.get(side.name),
        "ratio": comparison.ratios.get(side.name),
        "memory_bytes": measured and measured.taken_bytes,
        "bottleneck": side.bottleneck and side.bottleneck.kind,
        "error": side.error,
    }


def _with_limits(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in which an interval is three numbers."""
    intervals = {name: value for name, value in row.items() if isinstance(value, Interval)}
    limits = {f"{name}_{limit}": getattr(its, limit) for name, its in intervals.items() for limit in ("low", "high")}
    return {**row, **{name: its.value for name, its in intervals.items()}, **limits}


def _frame(rows: Iterable[Mapping[str, Any]], columns: str) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError("to_dataframe()", "pandas", "tune") from error
    kinds = {name: kind for kind, names in TYPES.items() for name in names.split()}
    types = {name: kinds.get(name, "float64") for name in columns.split()}
    frame: pd.DataFrame = pd.DataFrame([*map(_with_limits, rows)], columns=list(types)).astype(types)
    return frame
