"""Plain tables, and sentences wrapped to the width of a terminal; no colour codes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80
"""Columns that every terminal, log and e-mail has."""
NARROWEST = 11
"""A column that is wrapped keeps so much: its longest word, "persistent,"."""


def wrapped(text: str, width: int = WIDTH, indent: str = "  ") -> str:
    """Each line of a text, wrapped; what does not fit goes on indented."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.splitlines() or [""]))


def tail_of(name: str, longest: int) -> str:
    """A name that is too long for its place, by its end, which tells most."""
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def table_text(
    headers: Sequence[str],
    groups: Sequence[Sequence[Sequence[str]]],
    *,
    numeric: Sequence[int] = (),
    wraps: int = 0,
    width: int = WIDTH,
) -> str:
    """A table, with its groups of rows apart.

    Args:
        headers: of the columns.
        groups: rows of cells, group by group.
        numeric: columns that are aligned right.
        wraps: the column that is wrapped where the table would be too wide.
        width: of the table, if wrapping one column can reach it.
    """
    rows = [row for group in groups for row in group]
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    own = widths[wraps]
    widths[wraps] = min(own, max(NARROWEST, len(headers[wraps]), own + width - sum(widths) - 2 * (len(widths) - 1)))
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    lines = [*_lines(headers, widths, numeric, wraps, gap), "─" * (sum(widths) + len(gap) * (len(widths) - 1))]
    for number, group in enumerate(groups):
        lines += [""] if number else []
        lines += [line for row in group for line in _lines(row, widths, numeric, wraps, gap)]
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int], numeric: Sequence[int], wraps: int, gap: str) -> list[str]:
    """A row; more than one line where the wrapped column needs them."""
    size = widths[wraps]
    whole = textwrap.wrap(row[wraps], size, break_on_hyphens=False, break_long_words=False) or [""]
    parts = [line[begin : begin + size] for line in whole for begin in range(0, max(1, len(line)), size)]
    lines = []
    for number, part in enumerate(parts):
        cells = [part if index == wraps else cell if number == 0 else "" for index, cell in enumerate(row)]
        aligned = [
            cell.rjust(column) if index in numeric else cell.ljust(column)
            for index, (cell, column) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(gap.join(aligned).rstrip())
    return lines
