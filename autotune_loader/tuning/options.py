"""The options of `tune()` that say how to search, validated: every mistake is answered with a value that would work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from autotune_loader.values.validation import (
    parse_bytes,
    parse_seconds,
    require_bool,
    require_choice,
    require_count,
    require_int,
    require_number,
)

ALLOWABLE = (
    "batch_size",
    "in_order",
    "persistent_workers",
    "multiprocessing_context",
    "sharing_strategy",
    "drop_last",
)
"""What changes the semantics of training and is searched only where the user says so."""
Search = Literal["auto", "tpe", "grid", "random"]
SEARCHES: tuple[Search, ...] = get_args(Search)  # for the check of an argument


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How to search. Every field is the option of `tune()` with the same name, parsed.

    Raises:
        TypeError, ValueError: naming the option, its value and one that would work.
    """

    budget_s: float = 60.0
    """Wall seconds from call to result."""
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
    storage: str | None = field(default=None, repr=False)
    """May hold a password."""
    study_name: str | None = None
    stages: bool = True
    """Whether workers are watched for where the time of a sample goes, in the bursts of the search."""
    output: str | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("max_trials", 1), ("max_workers", 0), ("max_cores", 1)):
            require_count(name, getattr(self, name), minimum=minimum)
        require_int("seed", self.seed, minimum=0)
        for name, choices in (("search", SEARCHES),):
            require_choice(name, getattr(self, name), choices)
        for name in sorted(self.allow):
            require_choice("allow", name, ALLOWABLE)
        require_number("tolerance", self.tolerance, example=0.02)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance!r} is not a share between 0 and 1; tolerance=0.02 would work")
        require_bool("stages", self.stages)
        if not isinstance(self.study_name, (str, type(None))):
            raise TypeError(f"study_name={self.study_name!r} is not a text; study_name='my-study' would work")

    def limits(self) -> dict[str, Any]:
        """The options that decide what may be chosen, as plain JSON values: part of a result's identity in the cache."""
        names = ("max_workers", "max_cores", "max_host_memory_bytes", "max_shm_bytes", "tolerance", "search")
        return {"allow": sorted(self.allow), **{name: getattr(self, name) for name in names}}


OPTIONS = tuple(each.name.removesuffix("_s").removesuffix("_bytes") for each in fields(TuneOptions))
"""The options of `tune()`, of which sizes and times are raw: "60s", "8GB"."""


def parse_options(options: Mapping[str, Any]) -> TuneOptions:
    """`TuneOptions` from raw options of `tune()`: budgets such as "60s" or "3m", sizes such as "8GB", a tuple `allow`."""
    values = dict(options)
    for name, (parsed_name, parse) in _PARSERS.items():
        if name in values:
            values[parsed_name] = parse(name, values.pop(name))
    return TuneOptions(**values)


def _parse_allow(name: str, value: object) -> frozenset[str]:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(each, str) for each in names):
        raise TypeError(f"{name}={value!r} is not a collection of names; {name}=('batch_size',) would work")
    return frozenset(map(str, names))


def _parse_progress(_: str, value: object) -> object:
    if value not in (None, "auto", True, False):
        raise ValueError(f"progress={value!r} is not one of True, False and None; progress=True would work")
    return None if value == "auto" else value


def _parse_path(name: str, value: object, what: str = "a path", example: str = "'loader.json'") -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} is not {what}; {name}={example} would work")
    return None if value is None else os.fsdecode(value)


def _parse_storage(name: str, value: object) -> str | None:
    path = _parse_path(name, value, "a path or URL", "'study.journal'")
    if path and "://" not in path and re.search(r":.*@", path):
        raise ValueError(
            "storage is no URL without '://', and looks like one with a password, which no file should be named by; "
            "storage='postgresql+psycopg://user:password@host/db' would work"
        )
    return path


_PARSERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "budget": ("budget_s", parse_seconds),
    "max_host_memory": ("max_host_memory_bytes", parse_bytes),
    "max_shm": ("max_shm_bytes", parse_bytes),
    "allow": ("allow", _parse_allow),
    "output": ("output", _parse_path),
    "storage": ("storage", _parse_storage),
    "progress": ("progress", _parse_progress),
}
"""What is read from the user's own form of an option, and the field that it becomes."""
