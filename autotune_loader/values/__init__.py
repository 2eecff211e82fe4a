"""Records, errors, statistics and JSON, which everything else is written in. No torch is imported here.

config.py         the settings of a DataLoader, and checks of arguments
trace.py          the history of one batch; where a sample's time goes in a worker
sampled.py        the histories of a long training: rare batches, and a share of the common ones
measurement.py    a burst: its plan, what it measured or how it failed, and the trial that it is
statistics.py     intervals, and rounds as effects
serialization.py  dataclasses as JSON, and as files
units.py          numbers for people
errors.py         every exception of the package
"""

from autotune_loader.values.config import (
    ALLOWABLE,
    TORCH_PREFETCH_FACTOR,
    WITHOUT_WORKERS,
    LoaderConfig,
    nearest,
    require_bool,
    require_choice,
    require_int,
)
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
    RateUnit,
    Trial,
    averaged,
)
from autotune_loader.values.sampled import LoaderTrace, Sampled
from autotune_loader.values.serialization import require_writable, write_json
from autotune_loader.values.statistics import BURSTS_DIFFER, WORTH_CLAIMING, Effects, Interval, Round, log_ratios
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace, StageTime, after_first_of_each, spans_of
