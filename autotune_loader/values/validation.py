"""Checks of one argument: the error names the argument, its value and one that would work."""

from __future__ import annotations

import difflib


def require_int(name: str, value: object, *, minimum: int, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    said = f"{name}={value!r} must be an integer >= {minimum}; {name}={max(minimum, 1)} would work"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(said)
    if value < minimum:
        raise ValueError(said)


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool; {name}=False would work")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the choices; the error suggests the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1) or [choices[0]]
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r} is not one of {known}; {name}={near[0]!r} would work")
