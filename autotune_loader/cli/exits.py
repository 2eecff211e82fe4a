"""Exit codes, and which one a result has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult

# 2 is click's own for a wrong command line, 130 a shell's for SIGINT (128 + 2).
FINE, BAD_INPUT, NOTHING_WORKED, OVER_LIMIT, INTERRUPTED = 0, 2, 3, 4, 130


def exit_code_of(result: TuningResult) -> int:
    """0 for a result, decided or not, 3 when nothing worked, 130 when it was interrupted."""
    return {"complete": FINE, "undecided": FINE, "fallback": NOTHING_WORKED, "partial": INTERRUPTED}[result.status]
