"""Checks of one argument: the error names the argument, its value and one that would work."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping

_UNITS_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_UNITS_BYTES = {"": 1.0, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
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


def require_number(name: str, value: object, *, example: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is not a number; {name}={example} would work")


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
    return _quantity(name, value, _UNITS_S, "seconds", f"{SHORTEST_BUDGET_S:.0f} s", SHORTEST_BUDGET_S, "'60s'")


def parse_bytes(name: str, value: object) -> int | None:
    """Bytes from a number or a text such as "8GB" or "512MiB"; None stays None.

    Raises:
        TypeError, ValueError: it is none of these, or not positive.
    """
    return None if value is None else int(_quantity(name, value, _UNITS_BYTES, "bytes", "one byte", 1, "'8GB'"))


def _quantity(
    name: str, value: object, units: Mapping[str, float], what: str, least_words: str, least: float, example: str
) -> float:
    works = f"{name}={example} would work"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name}={value!r} is neither {what} nor a text such as {example}; {works}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        folded = {unit.lower(): factor for unit, factor in units.items()}
        if match is None or match[2].lower() not in folded:
            raise ValueError(f"{name}={value!r} cannot be read (units: {', '.join(filter(None, units))}); {works}")
        amount = float(match[1]) * folded[match[2].lower()]
    else:  # an integer may be too long for a float, which then could only be infinite
        amount = float("inf") if abs(value) > sys.float_info.max else float(value)
    if not least <= amount < float("inf"):
        raise ValueError(f"{name}={value!r} is not at least {least_words}; {works}")
    return amount
