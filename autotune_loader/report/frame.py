"""A result as pandas frames, in SI units: a row for each trial, or for each stage."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Any

from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.stages import StageTime
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

# Nullable types where pandas would turn a missing integer's column into floats, and a missing boolean's into objects. All
# that is not named here is text.
_TYPES = {
    "int64": "number num_workers device_prefetch",
    "Int64": "prefetch_factor batch_size consumer_threads rss_bytes pss_bytes shm_bytes gpu_memory_bytes",
    "bool": "pin_memory persistent_workers in_order",
    "boolean": "drop_last",
    "float64": "samples_per_s samples_per_s_low samples_per_s_high predicted_samples_per_s wait_share first_batch_s "
    "service_s service_cpu_s receive_s step_s cpu_share foreign_cpu_share gpu_busy_share gpu_util "
    "seconds",
}
_KNOBS = [field.name for field in fields(LoaderConfig)]
_REST = [name for names in _TYPES.values() for name in names.split() if name not in ("number", *_KNOBS)]
_COLUMNS = ["number", "role", *_KNOBS, *_REST, "failure_kind", "failure_phase", "failure_message"]


def trials_frame(result: TuningResult) -> pd.DataFrame:
    """One row per trial in the order they ran: configuration, rates, waits, memory, failure; missing is NA.

    Units are in the names: `_s` seconds, `_bytes` bytes, `_share` and `gpu_util` 0 to 1. The columns and their types
    are the same whatever was measured, also without a trial.
    """
    import pandas as pd

    frame = pd.DataFrame([row_of(trial) for trial in result.trials], columns=_COLUMNS)
    typed: pd.DataFrame = frame.astype({name: kind for kind, names in _TYPES.items() for name in names.split()})
    return typed


def stages_frame(result: TuningResult) -> pd.DataFrame:
    """One row per stage of a sample's way through a worker, the longest first; the columns are always the same."""
    import pandas as pd

    names = [field.name for field in fields(StageTime)]
    frame = pd.DataFrame([astuple(each) for each in result.stage_times], columns=names)
    kinds = {name: "float64" if name.endswith(("_s", "_share")) else "object" for name in names}
    typed: pd.DataFrame = frame.astype(kinds)
    return typed


def row_of(trial: Trial) -> dict[str, Any]:
    """Each column from the record that has a field of its name; what is named otherwise, by hand."""
    measured, failure = trial.measurement, trial.failure
    own: dict[str, Any] = {}
    if measured is not None:
        rate, gpu = measured.samples_per_s, measured.gpu
        own = {"samples_per_s": rate.value, "samples_per_s_low": rate.low, "samples_per_s_high": rate.high}
        own |= {"gpu_busy_share": gpu.busy_share, "gpu_util": gpu.util, "gpu_memory_bytes": gpu.memory_bytes}
    if failure is not None:
        own |= {f"failure_{name}": getattr(failure, name) for name in ("kind", "phase", "message")}
    for record in (trial, trial.config, measured, measured and measured.memory):
        own = {name: getattr(record, name) for name in _COLUMNS if hasattr(record, name)} | own
    return own
