"""A result as pandas frames, in SI units: a row for each trial, each stage, or each configuration."""

from __future__ import annotations

import math
from dataclasses import astuple, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

from autotune_loader.report.standings import Standing, final_ratios, predicted_rates, standings
from autotune_loader.report.units import counted
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.stages import StageTime
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import pandas as pd

# Nullable types where pandas would turn a missing integer's column into floats, and a missing boolean's into objects.
_TYPES = {
    "int64": "number num_workers device_prefetch",
    "Int64": "prefetch_factor batch_size consumer_threads rss_bytes pss_bytes shm_bytes gpu_memory_bytes",
    "bool": "pin_memory persistent_workers in_order",
    "boolean": "drop_last",
    "float64": "samples_per_s samples_per_s_low samples_per_s_high predicted_samples_per_s wait_share first_batch_s "
    "service_s service_cpu_s receive_s step_s cpu_share foreign_cpu_share gpu_busy_share "
    "gpu_util seconds",
}
# The order of the columns; a new field of the configuration gets one by itself.
_MEASURED = (
    "samples_per_s samples_per_s_low samples_per_s_high predicted_samples_per_s wait_share first_batch_s service_s "
    "service_cpu_s receive_s step_s cpu_share foreign_cpu_share rss_bytes pss_bytes shm_bytes "
    "gpu_busy_share gpu_util gpu_memory_bytes seconds failure_kind failure_phase failure_message"
)
_COLUMNS = ("number", "role", *(field.name for field in fields(LoaderConfig)), *_MEASURED.split())  # all of them

RIVAL_COLUMNS = [
    "configuration",
    "search_samples_per_s",
    "finals_samples_per_s",
    "predicted_samples_per_s",
    "rounds",
    "why",
]


def trials_frame(result: TuningResult) -> pd.DataFrame:
    """One row per trial in the order they ran: configuration, rates, waits, memory, failure; missing is NA.

    Units are in the names: `_s` seconds, `_bytes` bytes, `_share` and `gpu_util` 0 to 1. The columns and their types
    are the same whatever was measured, also without a trial.
    """
    import pandas as pd

    frame = pd.DataFrame([_row(trial) for trial in result.trials], columns=list(_COLUMNS))
    typed: pd.DataFrame = frame.astype({name: kind for kind, names in _TYPES.items() for name in names.split()})
    return typed


def stages_frame(result: TuningResult) -> pd.DataFrame:
    """One row per stage of a sample's way through a worker, the longest first; the columns are always the same."""
    import pandas as pd

    names = [field.name for field in fields(StageTime)]
    frame = pd.DataFrame([astuple(each) for each in result.stage_times], columns=names)
    typed: pd.DataFrame = frame.astype(
        {name: "float64" if name.endswith(("_s", "_share")) else "object" for name in names}
    )
    return typed


def _row(trial: Trial) -> dict[str, Any]:
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


def rivals_frame(result: TuningResult) -> pd.DataFrame:
    """One row for each configuration in the order of the report's table; what was not measured is NA.

    `search_samples_per_s` is its last burst that worked in the search, `finals_samples_per_s` its mean over the paired rounds,
    `predicted_samples_per_s` a prediction from all bursts, `why` the reason for or against it.
    """
    import pandas as pd

    rows = standings(result)
    predicted = predicted_rates(result, [row.config for row in rows]) or [math.nan] * len(rows)
    found = []
    for row, rate in zip(rows, predicted, strict=True):
        key, raced = row.config.key(), result.finals.rates_of(row.config)
        searched = [trial.samples_per_s for trial in result.trials if trial.config.key() == key and trial.samples_per_s]
        means = (searched[-1] if searched else math.nan, fmean(raced) if raced else math.nan)
        found.append((str(row.config), *means, rate, len(raced), _why(result, row)))
    frame: pd.DataFrame = pd.DataFrame(found, columns=RIVAL_COLUMNS)
    return frame


def _why(result: TuningResult, row: Standing) -> str:
    if row.is_best:
        return "chosen"
    if row.failure is not None:
        return f"failed: {row.failure.message}"
    ratios = [ratio for _, ratio in final_ratios(result.finals, row.config, result.best)]
    if not ratios:
        return "not in the paired rounds: not expected to be faster by more than the tolerance"
    ratio = math.exp(fmean(map(math.log, ratios)))
    paired = f"{ratio:.2f} times the chosen one's rate in {counted(len(ratios), 'paired round')}"
    if row.ties_with_best:
        return f"equally fast, and not cheaper: {paired}"
    if round(ratio, 2) == 1:
        return f"no faster: {paired}"
    return f"slower: {paired}" if ratio < 1 else f"not shown to be faster: {paired}"
