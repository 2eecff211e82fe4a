"""A fleet's collection as text: one row for each kind of machine, and which of them this one would be given."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.tables import BEST, render_table
from autotune_loader.report.units import UNKNOWN, bytes_text, rate_text
from autotune_loader.results.loader_file import LoaderFile, config_in


def render_fleet(entries: Sequence[LoaderFile], given: LoaderFile | None) -> str:
    """The table of a collection; `given` is the entry that `load_config()` gives this machine."""
    rows = [(BEST if entry is given else "", *_cells(entry)) for entry in entries]
    legend = f"{BEST} what load_config() gives this machine" if given else "Nothing in it is for this machine."
    headers = ("", "dataset", "cores", "memory", "GPUs", "torch", "configuration", "samples/s")
    return "\n".join([render_table(headers, [rows] if rows else [], 110, numeric=(2, 3, 7)), "", legend])


def _cells(entry: LoaderFile) -> tuple[str, ...]:
    tuned_on, rate = entry.fingerprint, entry.measured.samples_per_s
    machine = _machine(tuned_on) if tuned_on is not None else (UNKNOWN,) * 5
    return (*machine, str(config_in(entry)), rate_text(rate.value if rate else None))


def _machine(tuned_on: Fingerprint) -> tuple[str, ...]:
    gpus = [f"{tuned_on.gpus.count(name)} x {name}" for name in dict.fromkeys(tuned_on.gpus)]
    return (
        tuned_on.dataset or UNKNOWN,
        f"{tuned_on.usable_cores:g}",
        bytes_text(tuned_on.memory_bytes),
        ", ".join(gpus) or "none",
        tuned_on.torch or UNKNOWN,
    )
