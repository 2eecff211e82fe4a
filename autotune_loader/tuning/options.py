"""The options of `tune()` that say how to search, validated: every mistake is answered with a value that would work."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from autotune_loader.report.progress import PROGRESS_MODES, ProgressMode
from autotune_loader.values.plan import ISOLATIONS, Isolation
from autotune_loader.values.validation import require_bool, require_choice, require_count, require_number

# What changes the semantics of training and is searched only where the user says so.
ALLOWABLE = (
    "batch_size",
    "in_order",
    "persistent_workers",
    "multiprocessing_context",
    "sharing_strategy",
    "drop_last",
)
Search = Literal["auto", "tpe", "grid", "random"]
SEARCHES: tuple[Search, ...] = get_args(Search)  # for the check of an argument
_UNITS_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_UNITS_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Below this the first batch and one burst do not fit, whatever the workload.
SHORTEST_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How to search. Every field is the option of `tune()` with the same name, parsed.

    Raises:
        TypeError, ValueError: naming the option, its value and one that would work.
    """

    budget_s: float = 60.0
    """Wall seconds from call to result, everything counted."""
    max_trials: int | None = None
    max_workers: int | None = None
    max_cores: int | None = None
    """Cores that bursts, with their workers, run on."""
    max_host_memory_bytes: int | None = None
    max_shm_bytes: int | None = None
    allow: frozenset[str] = frozenset()
    tolerance: float = 0.02
    """Configurations this close to the fastest count as equally fast; the cheapest of them is chosen."""
    search: Search = "auto"
    seed: int = 0
    isolation: Isolation = "auto"
    storage: str | None = field(default=None, repr=False)
    """May hold a password."""
    study_name: str | None = None
    reuse: bool = True
    stages: bool = True
    """Whether workers are watched for where the time of a sample goes, in the bursts of the search."""
    output: str | None = None
    progress: ProgressMode = "auto"

    def __post_init__(self) -> None:
        for name in ("max_trials", "max_workers"):
            require_count(name, getattr(self, name), minimum=1 if name == "max_trials" else 0)
        require_count("max_cores", self.max_cores, minimum=1)
        if self.seed is None:
            raise TypeError("seed=None is not an integer; seed=1 would work")
        require_count("seed", self.seed, minimum=0)
        require_choice("search", self.search, SEARCHES)
        require_choice("isolation", self.isolation, ISOLATIONS)
        require_choice("progress", self.progress, PROGRESS_MODES)
        for name in sorted(self.allow):
            require_choice("allow", name, ALLOWABLE)
        require_number("tolerance", self.tolerance, example=0.02)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance!r} is not a share between 0 and 1; tolerance=0.02 would work")

    def limits(self) -> dict[str, Any]:
        """The options that decide what may be chosen, as plain JSON values: part of a result's identity in the cache."""
        names = ("max_workers", "max_cores", "max_host_memory_bytes", "max_shm_bytes", "tolerance", "search")
        return {"allow": sorted(self.allow), **{name: getattr(self, name) for name in names}}


# The options of `tune()`, of which sizes and times are raw: "60s", "8GB".
OPTIONS = tuple(each.name.removesuffix("_s").removesuffix("_bytes") for each in fields(TuneOptions))


def parse_options(options: dict[str, Any]) -> TuneOptions:
    """`TuneOptions` from the raw options of `tune()`: budgets such as "60s" or "3m", sizes such as "8GB", a tuple `allow`."""
    values = dict(options)
    values["budget_s"] = parse_seconds("budget", values.pop("budget"))
    values["max_host_memory_bytes"] = parse_bytes("max_host_memory", values.pop("max_host_memory"))
    values["max_shm_bytes"] = parse_bytes("max_shm", values.pop("max_shm"))
    values["allow"] = _parse_allow(values.pop("allow"))
    values["output"] = _parse_path("output", values["output"], what="a path", example="'loader.json'")
    values["storage"] = _parse_path("storage", values["storage"], what="a path or URL", example="'study.journal'")
    if values["storage"] and "://" not in values["storage"] and re.search(r":.*@", values["storage"]):
        raise ValueError(
            "storage is no URL without '://', and looks like one with a password, which no file should be named by; "
            "storage='postgresql+psycopg://user:password@host/db' would work"
        )
    if isinstance(values["progress"], bool):
        values["progress"] = "on" if values["progress"] else "off"
    if values["study_name"] is not None and not isinstance(values["study_name"], str):
        raise TypeError(f"study_name={values['study_name']!r} is not a text; study_name='my-study' would work")
    for name in ("reuse", "stages"):
        require_bool(name, values[name])
    return TuneOptions(**values)


def parse_seconds(name: str, value: object) -> float:
    """Seconds from a number, "90", "90s", "3m" or "1h".

    Raises:
        TypeError, ValueError: it is none of these, or too short to measure anything.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name}={value!r} is neither seconds nor a text such as '60s'; {name}='60s' would work")
    seconds = _parse_quantity(name, value, _UNITS_S, example="'60s'")
    if not SHORTEST_BUDGET_S <= seconds < float("inf"):
        raise ValueError(f"{name}={value!r} is not at least {SHORTEST_BUDGET_S:.0f} s; {name}='60s' would work")
    return seconds


def parse_bytes(name: str, value: object) -> int | None:
    """Bytes from a number or a text such as "8GB" or "512MiB"; None stays None.

    Raises:
        TypeError, ValueError: it is none of these, or not positive.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name}={value!r} is neither bytes nor a text such as '8GB'; {name}='8GB' would work")
    size = _parse_quantity(name, value, _UNITS_BYTES, example="'8GB'")
    if not 1 <= size < float("inf"):
        raise ValueError(f"{name}={value!r} is not at least one byte; {name}='8GB' would work")
    return int(size)


def _parse_quantity(name: str, value: float | str, units: dict[str, Any], example: str) -> float:
    if not isinstance(value, str):
        # An integer may be too long for a float, which then could only be infinite.
        return float("inf") if abs(value) > sys.float_info.max else float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    folded = {unit.lower(): factor for unit, factor in units.items()}
    if match is None or match[2].lower() not in folded:
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f"{name}={value!r} cannot be read (units: {known}); {name}={example} would work")
    return float(match[1]) * float(folded[match[2].lower()])


def _parse_allow(value: object) -> frozenset[str]:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"allow={value!r} is not a collection of names; allow=('batch_size',) would work")
    return frozenset(map(str, names))


def _parse_path(name: str, value: object, *, what: str, example: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} is not {what}; {name}={example} would work")
    return os.fsdecode(value)
