"""Which line of the script made a loader: noted on the loader itself."""

from __future__ import annotations

from typing import Any

from autotune_loader.values.lines import Line

LINE = "_autotune_loader_line"
"""Attribute of a loader: file and number of the line that made it."""


def line_of(loader: Any) -> Line | None:
    """The line of the user's code that made a loader; None where it was not seen."""
    found = vars(loader).get(LINE)
    return None if found is None else Line(*found)
