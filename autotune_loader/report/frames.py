"""Results as pandas frames: a row for each trial, each stage, or each side of a comparison.

Units are in the names: `_s` seconds, `_bytes` bytes, `_share` 0 to 1. Columns and their types are always the same, also
without a row; what was not measured is NA. Of a GPU, `gpu_busy_share` (steps, by its events) and `gpu_memory_bytes` (as torch
allocated it) are the job's, `gpu_utilization` (0 to 1, kernels) and `gpu_used_bytes` everybody's, as NVML tells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.result import TuningResult
from autotune_loader.values import Interval, MissingExtraError, Trial

if TYPE_CHECKING:
    import pandas as pd

# Columns with their types, which allow NA: pandas would turn integers beside a missing one into floats.
WHOLE, REAL, FLAG, TEXT = "Int64", "float64", "boolean", "object"
OF_TRIAL = {
    **dict.fromkeys(("number", "round", "num_workers", "prefetch_factor"), WHOLE),
    **dict.fromkeys(("pin_memory", "persistent_workers", "in_order"), FLAG),
    "multiprocessing_context": TEXT,
    "batch_size": WHOLE,
    "device_prefetch": WHOLE,
    **dict.fromkeys(("samples_per_s", "samples_per_s_low", "samples_per_s_high", "predicted_samples_per_s"), REAL),
    **dict.fromkeys(
        ("wait_share", "first_batch_s", "service_s", "service_cpu_s", "receive_s", "step_s", "copy_s"), REAL
    ),
    **dict.fromkeys(("cpu_share", "foreign_cpu_share"), REAL),
    **dict.fromkeys(("rss_bytes", "pss_bytes", "shm_bytes"), WHOLE),
    **dict.fromkeys(("gpu_busy_share", "gpu_utilization"), REAL),
    **dict.fromkeys(("gpu_memory_bytes", "gpu_used_bytes"), WHOLE),
    "seconds": REAL,
    **dict.fromkeys(("failure_kind", "failure_phase", "failure_message"), TEXT),
}
OF_STAGE = {"stage": TEXT, "where": TEXT, **dict.fromkeys(("wall_share", "cpu_share", "wall_s", "cpu_s"), REAL)}
SIDE_SHARES = ("wait_share", "cpu_share", "gpu_busy_share", "gpu_utilization")
OF_SIDE = {
    "side": TEXT,
    "config": TEXT,
    "batch_size": WHOLE,
    **dict.fromkeys(("rate", "rate_low", "rate_high", "ratio", "ratio_low", "ratio_high"), REAL),
    **dict.fromkeys(SIDE_SHARES, REAL),
    "memory_bytes": WHOLE,
    "bottleneck": TEXT,
    "error": TEXT,
}


def trials_frame(result: TuningResult) -> pd.DataFrame:
    """One row per trial in the order they ran: configuration, rates, waits, memory, failure."""
    return _frame(map(_trial_row, result.trials), OF_TRIAL)


def stages_frame(result: TuningResult) -> pd.DataFrame:
    """One row per stage of a sample in a worker, the longest first."""
    return _frame(map(asdict, result.stages), OF_STAGE)


def sides_frame(comparison: Comparison) -> pd.DataFrame:
    """One row per side: configuration, rate and ratio with their limits, shares, bytes, bottleneck, error."""
    return _frame((_side_row(comparison, side) for side in comparison.sides), OF_SIDE)


def _trial_row(trial: Trial) -> dict[str, Any]:
    """Each column from the record that has a field of its name, the first of those that have one."""
    measured, failure = trial.measurement, trial.failure
    row: dict[str, Any] = {} if measured is None else _limits("samples_per_s", measured.samples_per_s)
    if failure is not None:
        row |= {f"failure_{name}": getattr(failure, name) for name in ("kind", "phase", "message")}
    for record in (trial, trial.config, measured, measured and measured.memory):
        row = {name: getattr(record, name) for name in OF_TRIAL if hasattr(record, name)} | row
    return row


def _side_row(comparison: Comparison, side: Side) -> dict[str, Any]:
    row: dict[str, Any] = {
        "side": side.name,
        "config": str(side.config),
        **_limits("rate", comparison.rates.get(side.name)),
        **_limits("ratio", comparison.ratios.get(side.name)),
        "bottleneck": side.bottleneck and side.bottleneck.kind,
        "error": side.error,
    }
    if (measured := side.measurement) is not None:
        row |= {name: getattr(measured, name) for name in SIDE_SHARES}
        row |= {"batch_size": round(measured.batch_size), "memory_bytes": measured.taken_bytes}
    return row


def _limits(name: str, interval: Interval | None) -> dict[str, float]:
    if interval is None:
        return {}
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _frame(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError("to_dataframe()", "pandas", "tune") from error
    frame: pd.DataFrame = pd.DataFrame(list(rows), columns=list(columns)).astype(columns)
    return frame
