"""Who is told while a search runs: the file that is rewritten after every trial, and the line on the screen."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from autotune_loader.report.progress import Progress
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.assemble import assemble
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trial import Trial

log = logging.getLogger(__name__)

NOT_WRITTEN = "could not be written"
"""What a warning says of a file that was asked for."""


class FileAndProgress:
    """Rewrites `loader.json` after every trial and draws a line for it."""

    def __init__(self, context: RunContext, output: str | None, progress: Progress, started: float) -> None:
        self._context = context
        self._output = output
        self._progress = progress
        self._started = started

    def trial(self, state: SearchState, trial: Trial, seconds_left: float) -> None:
        best = state.fastest()
        self._progress.trial(trial, best, seconds_left)
        if self._output is not None and best is not None:
            saved(assemble(state, self._context, time.monotonic() - self._started, final=False), self._output)

    def finals_round(self, number: int, rates: dict[LoaderConfig, float], seconds_left: float) -> None:
        self._progress.finals_round(number, rates, seconds_left)


def saved(result: TuningResult, output: str | None) -> TuningResult:
    """The result, written where that was asked for. A disk that is full by now costs a warning, not the result."""
    if output is None:
        return result
    try:
        result.save(output)
    except OSError as error:
        text = f"{output} {NOT_WRITTEN} ({error.strerror}); result.save() elsewhere keeps the result"
        log.warning(text)
        return replace(result, warnings=(*result.warnings, text))
    return result
