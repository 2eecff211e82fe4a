"""A fleet's collection as text: one row for each kind of machine, and which of them this one would be given."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.tables import BEST, render_table
from autotune_loader.report.units import UNKNOWN, bytes_text, rate_text
from autotune_loader.results.loader_file import LoaderFile, config_in

_HEADERS = ("", "dataset", "cores", "memory", "GPUs", "torch", "configuration", "samples/s")
_NUMERIC = (2, 3, 7)


def render_fleet(entries: Sequence[LoaderFile], given: LoaderFile | None, width: int = 110) -> str:
    """The table of a collection.

    Args:
        entries: of the collection.
        given: the one of them that `load_config()` gives this machine.
        width: of the text, in columns.
    """
    rows = [_cells(entry, mark=BEST if entry is given else "") for entry in entries]
    legend = (
        f"{BEST} what load_config() gives this machine" if given is not None else "Nothing in it is for this machine."
    )
    table = render_table(_HEADERS, [rows] if rows else [], width, numeric=_NUMERIC)
    return "\n".join([table, "", legend])


def _cells(entry: LoaderFile, mark: str) -> tuple[str, ...]:
    tuned_on, rate = entry.fingerprint, entry.measured.samples_per_s
    machine = _machine(tuned_on) if tuned_on is not None else (UNKNOWN,) * 5
    return (mark, *machine, str(config_in(entry)), UNKNOWN if rate is None else rate_text(rate.value))


def _machine(tuned_on: Fingerprint) -> tuple[str, ...]:
    gpus = [f"{tuned_on.gpus.count(name)} x {name}" for name in dict.fromkeys(tuned_on.gpus)]
    return (
        tuned_on.dataset or UNKNOWN,
        f"{tuned_on.usable_cores:g}",
        bytes_text(tuned_on.memory_bytes),
        ", ".join(gpus) or "none",
        tuned_on.torch or UNKNOWN,
    )
