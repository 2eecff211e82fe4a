"""Two reports of `watch --json` side by side: which loader's training loop became slower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune_loader.report.tables import render_table
from autotune_loader.report.units import UNKNOWN, rate_text, share_text
from autotune_loader.values.errors import ConfigFileError


def read_watched(path: str) -> dict[str, Any] | None:
    """The loaders of a report of `watch --json`, by name; None for a file of another kind.

    Raises:
        ConfigFileError: it cannot be read, or is no JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # The stream is the script's, too: warnings and progress bars may stand around the report.
        reports = [line for line in text.splitlines() if line.startswith('{"verb":')]
        raw = json.loads(reports[-1] if reports else text)
        loaders = raw.get("loaders") if isinstance(raw, dict) and "verb" in raw else None
        return {each["name"]: each for each in loaders} if isinstance(loaders, list) else None
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ConfigFileError(
            f"path={path!r} cannot be read: {error}; autotune-loader watch --json train.py 2> {path} writes one"
        ) from error


def slowdowns(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float | None]:
    """Share of its rate that each loader of both reports lost; negative where it rose, None where a run was too short."""
    found: dict[str, float | None] = {}
    for name in [name for name in before if name in after]:
        rate, now = before[name].get("samples_per_s"), after[name].get("samples_per_s")
        found[name] = None if not rate or now is None else 1 - now / rate
    return found


def render_watched(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A row for each loader of both reports: its rate and its waiting, before and after."""
    rows = []
    for name, lost in slowdowns(before, after).items():
        both = before[name], after[name]
        rates, waits = ([each.get(key) for each in both] for key in ("samples_per_s", "wait_share"))
        change = UNKNOWN if lost is None else f"{-lost * 100:+.0f} %"
        rows.append((name, *map(rate_text, rates), *map(share_text, waits), change))
    headers = ("loader", "before", "after", "wait before", "wait after", "change")
    return render_table(headers, [rows], numeric=(1, 2, 3, 4, 5))
