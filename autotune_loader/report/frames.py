"""Results as pandas frames, in SI units: a row for each burst, each stage, or each side of a comparison.

Units are in the names: `_s` seconds, `_bytes` bytes, `_share` 0 to 1. The columns and their types are the same whatever was
measured, also without a row; what is missing is NA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.result import TuningResult
from autotune_loader.values import Interval, LoaderConfig, StageTime, Trial

if TYPE_CHECKING:
    import pandas as pd

_WHOLE = {"number", "round", "prefetch_factor", "batch_size", "rss_bytes", "pss_bytes", "shm_bytes"}
_WHOLE |= {"gpu_memory_bytes", "memory_bytes", "num_workers", "device_prefetch"}
_YES_OR_NO = {"pin_memory", "persistent_workers", "in_order"}
_TEXT = {"multiprocessing_context", "failure_kind", "failure_phase", "failure_message"}
_TEXT |= {"stage", "where", "side", "config", "bottleneck", "error"}
_KNOBS = [field.name for field in fields(LoaderConfig)]
_OF_BURST = (
    *("samples_per_s", "samples_per_s_low", "samples_per_s_high", "predicted_samples_per_s", "wait_share"),
    *("first_batch_s", "service_s", "service_cpu_s", "receive_s", "step_s", "copy_s", "cpu_share", "foreign_cpu_share"),
    *("rss_bytes", "pss_bytes", "shm_bytes", "gpu_busy_share", "gpu_memory_bytes", "seconds"),
    *("failure_kind", "failure_phase", "failure_message"),
)
_OF_SIDE = (
    *("side", "config", "batch_size", "rate", "rate_low", "rate_high", "ratio", "ratio_low", "ratio_high"),
    *("wait_share", "cpu_share", "gpu_busy_share", "memory_bytes", "bottleneck", "error"),
)


def trials_frame(result: TuningResult) -> pd.DataFrame:
    """One row per burst in the order they ran: configuration, rates, waits, memory, failure."""
    return _frame((row_of(trial) for trial in result.trials), ("number", "round", *_KNOBS, *_OF_BURST))


def stages_frame(result: TuningResult) -> pd.DataFrame:
    """One row per stage of a sample's way through a worker, the longest first."""
    return _frame((asdict(each) for each in result.stages), [field.name for field in fields(StageTime)])


def sides_frame(comparison: Comparison) -> pd.DataFrame:
    """One row for each side: configuration, rate and ratio with their limits, shares, bytes, what limits it, error."""
    return _frame((_side(comparison, side) for side in comparison.sides), _OF_SIDE)


def row_of(trial: Trial) -> dict[str, Any]:
    """Each column from the record that has a field of its name; what is named otherwise, by hand."""
    measured, failure = trial.measurement, trial.failure
    own: dict[str, Any] = {}
    if measured is not None:
        own = _limits("samples_per_s", measured.samples_per_s)
    if failure is not None:
        own |= {f"failure_{name}": getattr(failure, name) for name in ("kind", "phase", "message")}
    for record in (trial, trial.config, measured, measured and measured.memory):
        own = {
            name: getattr(record, name) for name in ("number", "round", *_KNOBS, *_OF_BURST) if hasattr(record, name)
        } | own
    return own


def _side(comparison: Comparison, side: Side) -> dict[str, Any]:
    measured = side.measurement
    return {
        "side": side.name,
        "config": str(side.config),
        "batch_size": None if measured is None else round(measured.batch_size),
        **_limits("rate", comparison.rates.get(side.name)),
        **_limits("ratio", comparison.ratios.get(side.name)),
        "wait_share": None if measured is None else measured.wait_share,
        "cpu_share": None if measured is None else measured.cpu_share,
        "gpu_busy_share": None if measured is None else measured.gpu_busy_share,
        "memory_bytes": None if measured is None else measured.taken_bytes,
        "bottleneck": None if side.bottleneck is None else side.bottleneck.kind,
        "error": side.error,
    }


def _limits(name: str, interval: Interval | None) -> dict[str, float | None]:
    low, value, high = (None, None, None) if interval is None else (interval.low, interval.value, interval.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _frame(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """A frame with nullable types where pandas would turn a missing integer's column into floats."""
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(columns))
    typed: pd.DataFrame = frame.astype({name: _kind(name) for name in frame.columns})
    return typed


def _kind(name: str) -> str:
    if name in _WHOLE:
        return "Int64"
    return "boolean" if name in _YES_OR_NO else "object" if name in _TEXT else "float64"
