"""Two machines side by side: the one a result was found on and this one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.report.tables import render_table
from autotune_loader.report.units import UNKNOWN, bytes_text


def render_machines(tuned_on: Fingerprint | None, here: Fingerprint | None = None) -> str:
    """A table of both machines, differences that matter marked and explained below it.

    Args:
        tuned_on: from `loader.json`; None where it holds none.
        here: this machine, inspected if None.
    """
    if tuned_on is None:
        return "The file does not say on which machine it was tuned."
    if here is None:
        here = inspect_machine().fingerprint(dataset=tuned_on.dataset, storage=tuned_on.storage)
    found = differences(tuned_on, here)
    marks = {each.field: "!" if each.matters else "~" for each in found}
    before, now = asdict(tuned_on), asdict(here)
    rows = [
        (
            marks.get(name, ""),
            name.removesuffix("_bytes").replace("_", " "),
            _text(name, before[name]),
            _text(name, now[name]),
        )
        for name in before
    ]
    table = render_table(("", "machine", "tuned on", "here"), [rows])
    sentences = [f"{marks[each.field]} {each.sentence}" for each in sorted(found, key=lambda each: not each.matters)]
    return "\n".join([table, "", *(sentences or ["This machine is the same in all that matters."])])


def _text(name: str, value: Any) -> str:
    if value is None or value in ("", (), {}):
        return UNKNOWN
    if name.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={each}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
