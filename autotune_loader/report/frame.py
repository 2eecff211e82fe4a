"""The trials as a pandas frame: one row per trial, SI units, nothing computed anew."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

_KNOBS = tuple(field.name for field in fields(LoaderConfig))
# Integers that may be missing: without a nullable type pandas would turn 2 into 2.0.
_NULLABLE_INTEGERS = (
    "prefetch_factor",
    "batch_size",
    "consumer_threads",
    "rss_bytes",
    "pss_bytes",
    "shm_bytes",
    "gpu_memory_bytes",
)
_NULLABLE_BOOLEANS = ("drop_last",)
_FLOATS = (
    "samples_per_s",
    "samples_per_s_low",
    "samples_per_s_high",
    "predicted_samples_per_s",
    "wait_share",
    "first_batch_s",
    "service_s",
    "service_cpu_s",
    "receive_s",
    "step_s",
    "cpu_share",
    "foreign_cpu_share",
    "pss_slope_bytes_per_s",
    "gpu_util",
    "seconds",
)
_COLUMNS = (
    *("number", "role", *_KNOBS),
    *("samples_per_s", "samples_per_s_low", "samples_per_s_high", "predicted_samples_per_s"),
    *("wait_share", "first_batch_s", "service_s", "service_cpu_s", "receive_s", "step_s"),
    *("cpu_share", "foreign_cpu_share", "rss_bytes", "pss_bytes", "pss_slope_bytes_per_s", "shm_bytes"),
    *("gpu_util", "gpu_memory_bytes", "seconds", "failure_kind", "failure_phase", "failure_message"),
)


def trials_frame(result: TuningResult) -> pd.DataFrame:
    """One row per trial in the order they ran: configuration, rates, waits, memory, failure; missing is NA.

    Units are in the names: `_s` seconds, `_bytes` bytes, `_share` and `gpu_util` 0 to 1. The columns and their types
    are the same whatever was measured, also without a trial.
    """
    import pandas as pd

    frame = pd.DataFrame([_row(trial) for trial in result.trials], columns=list(_COLUMNS))
    types = {
        **dict.fromkeys(("number", "num_workers", "device_prefetch"), "int64"),
        **dict.fromkeys(("pin_memory", "persistent_workers", "in_order"), "bool"),
        **dict.fromkeys(_NULLABLE_INTEGERS, "Int64"),
        **dict.fromkeys(_NULLABLE_BOOLEANS, "boolean"),
        **dict.fromkeys(_FLOATS, "float64"),
    }
    typed: pd.DataFrame = frame.astype(types)
    return typed


def _row(trial: Trial) -> dict[str, Any]:
    row: dict[str, Any] = {"number": trial.number, "role": trial.role, **trial.config.to_dict()}
    row |= {"predicted_samples_per_s": trial.predicted_samples_per_s, "seconds": trial.seconds}
    if trial.measurement is not None:
        row |= _measured(trial.measurement)
    if trial.failure is not None:
        row |= _failed(trial.failure)
    return row


def _measured(measurement: Measurement) -> dict[str, Any]:
    rate, memory, gpu = measurement.samples_per_s, measurement.memory, measurement.gpu
    names = ("wait_share", "first_batch_s", "service_s", "service_cpu_s", "receive_s", "step_s")
    row = {name: getattr(measurement, name) for name in (*names, "cpu_share", "foreign_cpu_share")}
    row |= {"samples_per_s": rate.value, "samples_per_s_low": rate.low, "samples_per_s_high": rate.high}
    row |= {"gpu_util": gpu.util, "gpu_memory_bytes": gpu.memory_bytes}
    for name in ("rss_bytes", "pss_bytes", "pss_slope_bytes_per_s", "shm_bytes"):
        row[name] = getattr(memory, name) if memory else None
    return row


def _failed(failure: Failure) -> dict[str, Any]:
    return {"failure_kind": failure.kind, "failure_phase": failure.phase, "failure_message": failure.message}
