"""Exit codes, and which one a result has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult

FINE = 0
BAD_INPUT = 2
NOTHING_WORKED = 3
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


def exit_code_of(result: TuningResult) -> int:
    """0 for a complete result, 3 when nothing worked, 130 when it was interrupted."""
    return {"complete": FINE, "fallback": NOTHING_WORKED, "partial": INTERRUPTED}[result.status]
