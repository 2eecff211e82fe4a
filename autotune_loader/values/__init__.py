"""Frozen records, errors, statistics and serialisation: what everything else is written in."""

from autotune_loader.values.config import FOR_AUTOLOADER, TORCH_PREFETCH_FACTOR, WITHOUT_WORKERS, LoaderConfig
from autotune_loader.values.errors import (
    ConfigFileError,
    MachineMismatchError,
    MissingExtraError,
    PlatformError,
    TunerError,
    WorkloadError,
)
from autotune_loader.values.measurement import (
    BurstPlan,
    Failure,
    FailureKind,
    FailurePhase,
    Measurement,
    MemoryUse,
    Trial,
    averaged,
)
from autotune_loader.values.serialization import from_plain, require_writable, to_plain, what_works, write_json
from autotune_loader.values.stages import OTHER_THREADS, TRANSFER, Seen, StageSamples, StageTime, pooled, stage_times
from autotune_loader.values.statistics import (
    TYPICAL_NOISE,
    Z_95,
    Effects,
    Interval,
    Round,
    correlated_mean_interval,
    log_ratios,
    mean_interval,
    student_t_quantile,
)
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace, after_first_of_each
from autotune_loader.values.validation import require_bool, require_choice, require_int

__all__ = [
    "FOR_AUTOLOADER",
    "MAIN_PROCESS",
    "OTHER_THREADS",
    "TORCH_PREFETCH_FACTOR",
    "TRANSFER",
    "TYPICAL_NOISE",
    "WITHOUT_WORKERS",
    "Z_95",
    "BatchTrace",
    "BurstPlan",
    "ConfigFileError",
    "Effects",
    "Failure",
    "FailureKind",
    "FailurePhase",
    "Interval",
    "LoaderConfig",
    "MachineMismatchError",
    "Measurement",
    "MemoryUse",
    "MissingExtraError",
    "PlatformError",
    "Round",
    "Seen",
    "StageSamples",
    "StageTime",
    "Trial",
    "TunerError",
    "WorkloadError",
    "after_first_of_each",
    "averaged",
    "correlated_mean_interval",
    "from_plain",
    "log_ratios",
    "mean_interval",
    "pooled",
    "require_bool",
    "require_choice",
    "require_int",
    "require_writable",
    "stage_times",
    "student_t_quantile",
    "to_plain",
    "what_works",
    "write_json",
]  # fmt: skip
