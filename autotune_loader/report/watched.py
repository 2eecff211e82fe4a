"""Two reports of `watch --json` side by side: which loader's training loop became slower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune_loader.report.tables import render_table
from autotune_loader.report.units import rate_text, share_text
from autotune_loader.values.errors import ConfigFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedChange:
    """One loader in both runs."""

    name: str
    """The line that makes it."""
    rates: tuple[float | None, float | None]
    """Samples/s before and after; None where a run was too short."""
    waits: tuple[float | None, float | None]

    @property
    def slowdown(self) -> float | None:
        """Share of the rate that was lost; negative where it rose."""
        before, after = self.rates
        return None if not before or after is None else 1 - after / before


def read_watched(path: str) -> dict[str, Any] | None:
    """The loaders of a report of `watch --json`, by name; None for a file of another kind.

    Raises:
        ConfigFileError: it cannot be read, or is no JSON.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigFileError(
            f"path={path!r} cannot be read: {error}; autotune-loader watch --json train.py 2> {path} writes one"
        ) from error
    loaders = raw.get("loaders") if isinstance(raw, dict) and "verb" in raw else None
    return {each["name"]: each for each in loaders} if isinstance(loaders, list) else None


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[WatchedChange]:
    """The loaders that are in both reports, in the order of the first."""
    return [
        WatchedChange(
            name=name,
            rates=(one.get("samples_per_s"), after[name].get("samples_per_s")),
            waits=(one.get("wait_share"), after[name].get("wait_share")),
        )
        for name, one in before.items()
        if name in after
    ]


def render_changes(found: list[WatchedChange]) -> str:
    """A row for each loader: its rate and its waiting, before and after."""
    rows = [
        (each.name, *map(rate_text, each.rates), *map(share_text, each.waits), _words(each.slowdown)) for each in found
    ]
    headers = ("loader", "before", "after", "wait before", "wait after", "change")
    return render_table(headers, [rows], numeric=(1, 2, 3, 4, 5))


def _words(slowdown: float | None) -> str:
    return "-" if slowdown is None else f"{-slowdown * 100:+.0f} %"
