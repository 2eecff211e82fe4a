"""Checks of one argument: the error names the argument, its value and one that would work."""

from __future__ import annotations

import difflib
import re

_UNITS_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
SHORTEST_BUDGET_S = 1.0
"""Below this the first batch and one burst do not fit, whatever the workload."""


def require_count(name: str, value: object, *, minimum: int) -> None:
    """None or an integer of at least `minimum`."""
    if value is not None:
        require_int(name, value, minimum=minimum)


def require_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an integer; {name}={max(minimum, 1)} would work")
    if value < minimum:
        raise ValueError(f"{name}={value} is below {minimum}; {name}={max(minimum, 1)} would work")


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool; {name}=False would work")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the choices; the error suggests the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1) or [choices[0]]
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r} is not one of {known}; {name}={near[0]!r} would work")


def parse_seconds(name: str, value: object) -> float:
    """Seconds from a number, "90", "90s", "3m" or "1h".

    Raises:
        TypeError, ValueError: it is none of these, or too short to measure anything.
    """
    works = f"{name}='60s' would work"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name}={value!r} is neither seconds nor a text such as '60s'; {works}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].lower() not in _UNITS_S:
        raise ValueError(f"{name}={value!r} cannot be read (units: {', '.join(filter(None, _UNITS_S))}); {works}")
    seconds = float(match[1]) * _UNITS_S[match[2].lower()]
    if not SHORTEST_BUDGET_S <= seconds < float("inf"):
        raise ValueError(f"{name}={value!r} is not at least {SHORTEST_BUDGET_S:.0f} s; {works}")
    return seconds
