"""The options of `tune()` that say how to search, validated: every mistake is answered with a value that would work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autotune_loader.tuning.arguments import in_a_loader, refuse
from autotune_loader.values import require_bool, require_choice, require_int

ALLOWABLE = ("in_order", "batch_size", "device_prefetch", "persistent_workers")
"""What changes training, or takes memory of the device, and is searched only where the user says so."""
_UNITS_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
SHORTEST_BUDGET_S = 1.0
"""Below this the first batch and one burst do not fit, whatever the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How to search: the arguments of `tune()` with these names, parsed."""

    budget_s: float
    """Most wall seconds for bursts, once their process is warm."""
    max_workers: int | None
    allow: frozenset[str]
    tolerance: float
    """Configurations this close to the fastest count as equally fast; the cheapest of them is chosen."""
    output: str | None
    progress: bool | None
    """None: on a terminal and in a notebook."""


def parse_options(
    *,
    budget: object = 60.0,
    max_workers: int | None = None,
    allow: object = (),
    tolerance: float = 0.02,
    output: object = None,
    progress: bool | None = None,
) -> TuneOptions:
    """`TuneOptions` from arguments of `tune()`: budgets such as "60s" or "3m", names of `allow` in any collection.

    Raises:
        TypeError, ValueError: naming the option, its value and one that would work.
    """
    require_int("max_workers", max_workers, minimum=0, or_none=True)
    names: list[Any] = [allow] if isinstance(allow, str) else list(allow) if isinstance(allow, Iterable) else [None]
    are_names = all(isinstance(each, str) for each in names)
    refuse(not are_names, f"allow={allow!r} is not a collection of names", "allow=('in_order',)")
    for name in sorted(names):
        require_choice("allow", name, ALLOWABLE)
    is_share = isinstance(tolerance, (int, float)) and 0 <= tolerance < 1
    refuse(not is_share, f"tolerance={tolerance!r} must be at least 0 and below 1", "tolerance=0.02", ValueError)
    is_path = output is None or isinstance(output, (str, os.PathLike))
    refuse(not is_path, f"output={output!r} is not a path", "output='loader.json'")
    if progress is not None:
        require_bool("progress", progress)
    return TuneOptions(
        budget_s=_seconds_of(budget),
        max_workers=max_workers,
        allow=frozenset(names),
        tolerance=tolerance,
        output=None if output is None else os.fsdecode(output),  # type: ignore[arg-type]
        progress=progress,
    )


def _seconds_of(budget: object) -> float:
    """Seconds from a number, "90", "90s", "3m" or "1h"."""
    given, works = f"budget={budget!r}", "budget='60s'"
    is_either = isinstance(budget, (int, float, str)) and not isinstance(budget, bool)
    refuse(not is_either, f"{given} is neither a number of seconds nor a string such as '60s'", works)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(budget))
    if match is None or match[2].lower() not in _UNITS_S:
        units = ", ".join(filter(None, _UNITS_S))
        raise ValueError(f"{given} cannot be read (units: {units}); {works} would work")
    seconds = float(match[1]) * _UNITS_S[match[2].lower()]
    is_long = SHORTEST_BUDGET_S <= seconds < float("inf")
    refuse(not is_long, f"{given} is not at least {SHORTEST_BUDGET_S:.0f} s", works, ValueError)
    return seconds


def check_study(study: Any, sampler: Any) -> None:
    """A study and a sampler of the user's are Optuna's.

    Raises:
        TypeError, ValueError: one is not, or the study looks for something else than the highest rate.
    """
    if study is None and sampler is None:
        return
    import optuna

    works = "study=optuna.create_study(direction='maximize')"
    refuse(not isinstance(study, (optuna.Study, type(None))), f"study={study!r:.60} is not an optuna.Study", works)
    is_sampler = sampler is None or isinstance(sampler, optuna.samplers.BaseSampler)
    of_torch = hasattr(sampler, "__iter__") and not isinstance(sampler, str)
    works_instead = in_a_loader("sampler") if of_torch else "sampler=optuna.samplers.TPESampler()"
    refuse(not is_sampler, f"sampler={sampler!r:.60} is not an Optuna sampler", works_instead)
    if study is not None:
        wanted = [optuna.study.StudyDirection.MAXIMIZE]
        refuse(study.directions != wanted, "study= must maximise one value, the samples/s", works, ValueError)
